"""Measure what the course claims about its ring all-reduce, side by side with MPI's own and with gloo's.

    python -m benchmarks.mpi                # a minute
    python -m benchmarks.mpi --quick        # small and short: it shows that all runs; its numbers are no claims
    python -m benchmarks.mpi --json FILE    # the table as JSON too

ring   megabytes a second of an all-reduce (bytes of the array / seconds until the last rank has the sum), float32, in place.
       Our ring, written in Python, against MPI_Allreduce of the same MPI and against gloo, which torch uses on CPUs.

The three take turns in the same processes, on 2 ranks, and on 4 where there are as many cores. A turn begins with a barrier, the
slowest rank counts, the ratio is taken within each round, and the median over the rounds counts.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import table
from benchmarks.table import Row, compare
from course_lib import processes
from course_lib.launch import GUARD, ONE_THREAD

MEGA = 10**6
BIN = Path(sys.executable).parent


def ask_ranks(folder: Path, n: int, sizes: list[int], *, rounds: int) -> dict[str, list[dict]]:
    """{way: a row for each size} on n ranks."""
    file = folder / "mpi.json"
    program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.mpi_ranks", file, rounds, *sizes]
    command = [*GUARD, BIN / "mpirun", "-n", n, *program]
    code, output = processes.run(list(map(str, command)), timeout=600, environments=[ONE_THREAD])
    if code != 0:
        raise RuntimeError(f"{output}\nthe ranks failed: {processes.failure(code, output, 600)}")
    return json.loads(file.read_text())


def measure_ring(folder: Path, *, quick: bool) -> Iterator[Row]:
    sizes = [4 * 1000] if quick else [4 * 1000, MEGA, 16 * MEGA, 64 * MEGA]
    for n in [2] if quick or os.cpu_count() < 4 else [2, 4]:
        found = ask_ranks(folder, n, sizes, rounds=3 if quick else 25)
        for number, size in enumerate(sizes):
            speed = {name: [size / s / MEGA for s in rows[number]["seconds"]] for name, rows in found.items()}
            what = f"MB/s, {n} ranks, {size / MEGA:g} MB, ring by hand"
            goal = (">=", 0.5) if quick or size == 16 * MEGA else None
            yield compare(what, speed["ring by hand"], "MPI_Allreduce", speed["MPI_Allreduce"], goal)
            yield compare(what, speed["ring by hand"], "gloo", speed["gloo"])


if __name__ == "__main__":
    table.main("benchmarks.mpi", __doc__, {"ring": measure_ring})
