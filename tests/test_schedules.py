"""Schedules on paper: the bubble is what the formula says, nothing happens before what it needs, and 1F1B keeps less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.parallel.pipeline import bubble
from course_lib.parallel.schedules import idle, in_flight, order, plan

NAMES = st.sampled_from(["gpipe", "1f1b"])


@given(NAMES, st.integers(1, 6), st.integers(1, 12), st.floats(0.5, 3))
def test_equal_stages_idle_as_the_formula_says(name, stages, micro_batches, backward):
    found = plan(name, micro_batches, [1.0] * stages, backward=[backward] * stages)
    assert idle(found) == pytest.approx(bubble(stages, micro_batches), abs=1e-9)


@given(NAMES, st.lists(st.floats(0.1, 5), min_size=1, max_size=5), st.integers(1, 8))
def test_nothing_happens_before_what_it_needs(name, costs, micro_batches):
    found = plan(name, micro_batches, costs)
    when = {(slot.kind, slot.number, n): slot for n, stage in enumerate(found) for slot in stage}
    assert len(when) == 2 * micro_batches * len(costs)
    for (kind, number, stage), slot in when.items():
        before = (kind, number, stage - 1) if kind == "forward" else (kind, number, stage + 1)
        if kind == "backward" and stage == len(costs) - 1:
            before = ("forward", number, stage)
        if before in when:
            assert slot.start >= when[before].end
    for stage in found:
        assert all(a.end <= b.start for a, b in zip(stage, stage[1:]))


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=5), st.integers(1, 8))
def test_the_slowest_stage_sets_the_pace(costs, micro_batches):
    last = max(slot.end for stage in plan("gpipe", micro_batches, costs) for slot in stage)
    assert last == pytest.approx(3 * (sum(costs) + (micro_batches - 1) * max(costs)))


@given(st.integers(1, 6), st.integers(1, 12))
def test_what_a_stage_must_keep(stages, micro_batches):
    for name, kept in (
        ("gpipe", lambda stage: micro_batches),
        ("1f1b", lambda stage: min(micro_batches, stages - stage)),
    ):
        found = plan(name, micro_batches, [1.0] * stages)
        assert [in_flight(stage) for stage in found] == [kept(stage) for stage in range(stages)]


def test_one_forward_one_backward_by_hand():
    assert "".join(f"{kind[0]}{n}" for kind, n in order("1f1b", 0, 2, 3)) == "f0f1b0f2b1b2"
    assert "".join(f"{kind[0]}{n}" for kind, n in order("1f1b", 1, 2, 3)) == "f0b0f1b1f2b2"
    assert "".join(f"{kind[0]}{n}" for kind, n in order("gpipe", 0, 2, 3)) == "f0f1f2b2b1b0"
