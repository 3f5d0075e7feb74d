"""The ring all-reduce by hand is MPI's, on real ranks, for any length and type."""

import sys
from pathlib import Path

import pytest
from helpers import BIN
from hypothesis import given
from hypothesis import strategies as st

from course_lib import processes
from course_lib.parallel.ring import edges

ON_RING = Path(__file__).parent / "on_ring.py"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_the_ring_is_mpis_all_reduce(ranks):
    command = [BIN / "mpirun", "-n", ranks, sys.executable, "-m", "mpi4py", ON_RING, ranks]
    code, output = processes.run(list(map(str, command)), timeout=120)
    assert code == 0, output
    assert output.count("155 right") == ranks, output


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_pieces_cover_the_array_and_differ_by_at_most_one(length, ranks):
    edge = edges(length, ranks)
    sizes = [b - a for a, b in zip(edge, edge[1:])]
    assert edge[0] == 0 and sum(sizes) == length and len(sizes) == ranks
    assert max(sizes) - min(sizes) <= 1
