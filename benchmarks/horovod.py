"""Measure Horovod beside torch's DDP, on the same two ranks and the same UNet.

    python -m benchmarks.horovod                # two minutes
    python -m benchmarks.horovod --quick        # small and short: it shows that all runs; its numbers are no claims
    python -m benchmarks.horovod --json FILE    # the table as JSON too

gloo   steps a second; both send by gloo. What differs is who decides what is sent when: buckets, or a conversation.
mpi    the same, but Horovod sends by MPI, in shared memory here, and DDP still by gloo, which it can't do without on a CPU.

Both live in the same processes and take turns; the ratio is taken within each round, and the median over the rounds counts.
Where Horovod is not installed (`make horovod`) there is nothing to measure.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks import table
from benchmarks.ddp import TINY, TORCH, rank_rates
from benchmarks.table import Row, compare

CASES = (  # few bytes for much computing, and many
    {"width": 16, "depth": 2, "size": 64, "steps": 5, "rounds": 15},
    {"width": 32, "depth": 3, "size": 32, "steps": 5, "rounds": 15},
)


def measure(launcher: str):
    def part(folder: Path, *, quick: bool) -> Iterator[Row]:
        if not find_spec("horovod"):
            print("Horovod is not installed: make horovod", flush=True)
            return
        for case in [TINY] if quick else CASES:
            rates = rank_rates(folder, "ddp", "horovod", launcher=launcher, **case)
            what = "steps/s, Horovod, {width} wide, {depth} deep, {size}×{size}".format(**case)
            yield compare(what, rates["horovod"], f"{TORCH}, gloo", rates["ddp"])

    return part


if __name__ == "__main__":
    table.main("benchmarks.horovod", __doc__, {"gloo": measure("env"), "mpi": measure("mpi")})
