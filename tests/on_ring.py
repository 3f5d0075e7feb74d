"""What ranks do in test_ring.py: the ring by hand against MPI's own all-reduce, for all lengths and types.

mpirun -n 3 python -m mpi4py tests/on_ring.py
"""

import sys

import numpy as np
from mpi4py import MPI

from course_lib.parallel import ring

comm = MPI.COMM_WORLD
assert comm.size == int(sys.argv[1])
random = np.random.default_rng(0)
lengths = [0, 1, 2, comm.size - 1, comm.size, comm.size + 1, 1000, *random.integers(1, 5000, 12)]
checked = 0
for length in map(int, lengths):
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        mine = (np.random.default_rng(comm.rank).standard_normal(length) * 1000).astype(dtype)
        right = np.empty_like(mine)
        comm.Allreduce(mine, right)
        for chunk in (1 + length // 7, ring.CHUNK):
            found = ring.all_reduce(mine.copy(), comm, chunk=chunk)
            if dtype in (np.int32, np.int64):
                assert np.array_equal(found, right), (length, dtype, chunk)
            else:
                np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-2 if dtype == np.float32 else 1e-9)
            assert len(set(comm.allgather(found.tobytes()))) == 1  # the same bits everywhere
            checked += 1
table = np.full((4, 6), float(comm.rank))
ring.all_reduce(table, comm)
assert (table == sum(range(comm.size))).all()
for scattered in (table.T, table[:, ::2], table[0, ::2]):
    try:
        ring.all_reduce(scattered, comm)
    except ValueError as error:
        assert "does not lie in one piece" in str(error)
        checked += 1
print(f"<{comm.rank}: {checked} right>", flush=True)
