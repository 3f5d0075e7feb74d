"""Measure what the course claims about its training loop and its ranks, side by side with the peers it claims it against.

    python -m benchmarks.ddp                    # everything: ten minutes
    python -m benchmarks.ddp --quick            # small and short: it shows that all runs; its numbers are no claims
    python -m benchmarks.ddp --only overlapped  # one part: overlapped, ranks, trainer or unet
    python -m benchmarks.ddp --json FILE        # the table as JSON too

overlapped  steps a second of 2 ranks with our three ways of averaging gradients, against torch's DDP, same --bucket-mb.
ranks       samples a second of 2 ranks, against 1 rank while the other waits, and against 2 ranks that do not talk: this
            machine's limit; and against 2 ranks that only wait for each other in every step, as all must that stay equal.
            Every rank has a batch of 8, however many there are.
trainer     CPU milliseconds a step that a trainer costs beyond a bare loop: ours with its log against the leanest Lightning
            Trainer, Fabric and Accelerate, all with the same loader; and what our loading thread adds while it hides nothing.
unet        CPU milliseconds of forward and backward, a step and a GFLOP, against other UNets of the same width, depth and norm.
            At most 1 times their time is at least 1 times their speed.

One thread computes on each rank. Those who are compared take turns, the ratio is taken within each round, and the median over
the rounds counts; of the trainers, which hardly differ, the best round. The peers of `trainer` and `unet` are no part of the
course: those that are not installed are left out.

    pip install accelerate monai segmentation-models-pytorch      # milesial's UNet: see benchmarks/nets.py
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import nets, table, trainers
from benchmarks.ddp_ranks import ALONE, APART, BATCH, IN_STEP
from benchmarks.table import Row, compare
from course_lib import processes
from course_lib.launch import GUARD, ONE_THREAD

TORCH = "torch DistributedDataParallel"
OURS = "ddp_overlapped"
TINY = {"width": 2, "depth": 1, "size": 16, "steps": 2, "rounds": 2}


def rank_rates(folder: Path, *loops: str, **options) -> dict[str, list[float]]:
    """Steps a second of 2 ranks in each of these loops, one number a round."""
    file = folder / "ranks.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    if options.get("launcher") == "mpi":
        launcher = [str(Path(sys.executable).with_name("mpirun")), "-n", "2", sys.executable, "-m", "mpi4py"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [*GUARD, *launcher, "-m", "benchmarks.ddp_ranks", str(file), f"--loops={','.join(loops)}", *flags]
    code, output = processes.run(command, timeout=1800, environments=[ONE_THREAD])
    if code != 0:
        raise RuntimeError(f"{output}\nthe ranks failed: {processes.failure(code, output, 1800)}")
    return {name: [1 / s for s in seconds] for name, seconds in json.loads(file.read_text()).items()}


def measure_overlapped(folder: Path, *, quick: bool) -> Iterator[Row]:
    cases = (  # the course's UNet, whose gradients fit into one bucket; and one with 16 times as much to send as fits into one
        {"width": 16, "depth": 2, "size": 64, "bucket_mb": 25, "steps": 5, "rounds": 15},
        {"width": 32, "depth": 3, "size": 32, "bucket_mb": 0.5, "steps": 5, "rounds": 15},
    )
    for case in [TINY | {"bucket_mb": 25}] if quick else cases:
        rates = rank_rates(folder, "ddp", OURS, "ddp_bucketed", "ddp_naive", **case)
        what = "{width} wide, {depth} deep, {size}×{size}, {bucket_mb} MB".format(**case)
        for name in list(rates)[1:]:
            goal = (">=", 0.95) if name == OURS else None
            yield compare(f"steps/s, {name}, {what}", rates[name], TORCH, rates["ddp"], goal)


def measure_ranks(folder: Path, *, quick: bool) -> Iterator[Row]:
    case = TINY if quick else {"width": 16, "depth": 2, "size": 64, "steps": 5, "rounds": 15}
    rates = rank_rates(folder, "ddp", OURS, APART, IN_STEP, ALONE, **case)
    samples = {name: [(1 if name == ALONE else 2) * BATCH * r for r in values] for name, values in rates.items()}
    for name, label in (("ddp", TORCH), (OURS, OURS)):
        what = f"samples/s, 2 ranks, {label}"
        yield compare(what, samples[name], "1 rank alone", samples[ALONE])
        limit = "machine limit: 2 ranks without communication"
        yield compare(what, samples[name], limit, samples[APART], (">=", 0.95))
        yield compare(what, samples[name], "2 ranks that wait for each other, nothing more", samples[IN_STEP])
    yield compare("samples/s, 2 ranks without communication", samples[APART], "1 rank alone", samples[ALONE])


def measure_trainer(folder: Path, *, quick: bool) -> Iterator[Row]:
    steps, rounds = (10, 2) if quick else (60, 40)
    seconds = trainers.cpu_seconds(folder, steps=steps, rounds=rounds, size=8, width=1, depth=0)
    total = {name: 1e3 * value for name, value in seconds.items()}
    bare, again = total.pop(trainers.BARE), total.pop(trainers.AGAIN)
    yield Row("CPU ms a step, the bare loop again: the noise", again, trainers.BARE, bare)
    yield Row("CPU ms a step, our trainer", total[trainers.OURS], trainers.BARE, bare)
    yield Row("CPU ms a step, our trainer and its loading thread", total.pop(trainers.AHEAD), trainers.BARE, bare)
    extra = {name: max(1e-3, value - bare) for name, value in total.items()}  # nothing is measured below a microsecond
    for peer in list(extra)[1:]:
        what = "CPU ms a step beyond the bare loop, our trainer"
        yield Row(what, extra[trainers.OURS], peer, extra[peer], ("<=", 1.0))


def measure_unet(folder: Path, *, quick: bool) -> Iterator[Row]:
    size, steps, rounds = (16, 1, 1) if quick else (64, 1, 7)
    for peer in nets.PEERS:
        models = nets.our_models(**peer.like)
        try:
            models[peer.name] = peer.make()
        except ImportError as error:
            print(f"{peer.name} is not installed: {peer.install} ({error})", flush=True)
            continue
        found = nets.measure(models, size=size, steps=steps, rounds=rounds)
        theirs = found[peer.name]
        alike = "{width} wide {depth} deep {norm}".format(**peer.like)
        for padding in ("zeros", "circular"):
            ours, goal = found[padding], ("<=", 1.0) if padding == "zeros" else None
            a, b = ([1e3 * s for s in net.seconds] for net in (ours, theirs))
            yield compare(f"ms/step, {alike} {padding}, {ours}", a, f"{peer.name}: {theirs}", b, goal)
            a, b = ([s / net.gflop for s in times] for net, times in ((ours, a), (theirs, b)))
            yield compare(f"ms/GFLOP, {alike} {padding}", a, peer.name, b)
    found = nets.measure(nets.our_models(width=16, depth=2), size=size, steps=steps, rounds=rounds)
    circular, zeros = ([1e3 * s for s in found[padding].seconds] for padding in ("circular", "zeros"))
    yield compare(f"ms/step, 16 wide 2 deep group circular, {found['circular']}", circular, "itself, zeros", zeros)


PARTS = {
    "overlapped": measure_overlapped,
    "ranks": measure_ranks,
    "trainer": measure_trainer,
    "unet": measure_unet,
}


if __name__ == "__main__":
    table.main("benchmarks.ddp", __doc__, PARTS)
