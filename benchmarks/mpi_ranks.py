"""One of the ranks that benchmarks.mpi compares; it starts them so:

    mpirun -n 2 python -m mpi4py -m benchmarks.mpi_ranks FILE ROUNDS BYTES …

FILE gets {way: [{"ranks": n, "bytes": size, "seconds": [one number a round]}, …]}.
"""

import json
import sys
from pathlib import Path

from course_lib.config import Config
from course_lib.probe import race
from course_lib.world import start, stop

if __name__ == "__main__":
    file, rounds, *sizes = sys.argv[1:]
    world = start(Config(launcher="mpi", device="cpu"))
    found = race(world, [int(size) for size in sizes], repeats=int(rounds))
    if world.is_main:
        Path(file).write_text(json.dumps(found))
    stop(world)
