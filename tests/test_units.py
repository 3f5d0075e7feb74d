"""Tests that several workers share out: what must stay together does, and the longest begin."""

import pytest
from units import SPREAD, TOGETHER, turn_of, unit_of


def test_who_needs_a_dear_fixture_goes_where_it_is_made(request):
    """Of all tests that this run has collected: name a new file in units.TOGETHER."""
    for item in request.session.items:
        needed = [fixture for fixture in TOGETHER if fixture in item.fixturenames]
        assert not needed or unit_of(item.nodeid) in needed, item.nodeid


def test_only_tests_that_share_nothing_are_spread(request):
    """A fixture of the module would be made by each worker."""
    manager = request.session._fixturemanager
    for item in request.session.items:
        if item.path.stem in SPREAD:
            definitions = [one for name in item.fixturenames for one in manager.getfixturedefs(name, item) or ()]
            assert "module" not in {one.scope for one in definitions}, item.nodeid


@pytest.mark.parametrize(
    ("nodeid", "unit", "turn"),
    [
        ("tests/test_jobs.py::test_a[b::c]", "cluster", 0),
        ("tests/test_lessons.py::test_lesson_with_jobs_runs_on_slurm[05_launch]", "cluster", 0),
        ("tests/test_lessons.py::test_lesson_runs[04_ddp]", "tests/test_lessons.py::test_lesson_runs[04_ddp]", 1),
        ("tests/test_mpi.py::test_a", "trained", 2),
        ("tests/test_hub.py::test_a", "test_hub", 0),
        ("tests/test_unet.py::test_a", "test_unet", 3),
    ],
)
def test_units_by_hand(nodeid, unit, turn):
    assert (unit_of(nodeid), turn_of(nodeid)) == (unit, turn)
