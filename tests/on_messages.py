"""What ranks do in test_mpi.py: every collective made of messages against MPI's own.

mpirun -n 3 python -m mpi4py tests/on_messages.py 3
"""

import sys

import numpy as np
from mpi4py import MPI

from course_lib.parallel import messages

comm = MPI.COMM_WORLD
assert comm.size == int(sys.argv[1])
checked = 0
for length in (0, 1, 7, 100_000):  # the last one is too long to be sent before somebody receives it
    for dtype in (np.float32, np.int64):
        mine = np.random.default_rng(comm.rank).integers(0, 1000, length).astype(dtype)  # whose sums are exact
        right = mine.copy()
        comm.Bcast(right)
        found = mine.copy()
        messages.broadcast(found, comm)
        assert np.array_equal(found, right), ("broadcast", length, dtype)

        comm.Allreduce(mine, right)
        found = mine.copy()
        messages.reduce(found, comm)
        assert comm.rank or np.array_equal(found, right), ("reduce", length, dtype)
        found = mine.copy()
        messages.all_reduce(found, comm)
        assert np.array_equal(found, right), ("all_reduce", length, dtype)

        rows = np.empty((comm.size, length), dtype) if comm.rank == 0 else None
        messages.gather(mine, rows, comm)
        right = np.empty((comm.size, length), dtype) if comm.rank == 0 else None
        comm.Gather(mine, right)
        assert comm.rank or np.array_equal(rows, right), ("gather", length, dtype)
        found = np.empty_like(mine)
        messages.scatter(rows, found, comm)
        assert np.array_equal(found, mine), ("scatter", length, dtype)
        checked += 5
print(f"<{comm.rank}: {checked} equal>", flush=True)
