"""Timelines: what is recorded and when it stops, several ranks on one clock, and the order of things in real runs."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from course_lib.config import Config
from course_lib.data.tasks import make_task
from course_lib.timeline import Span, Timeline, at_once, read_timelines, share_during, split_waiting, unrecorded
from course_lib.trainer import fit, make_model

pytestmark = pytest.mark.usefixtures("alone")
STRATEGIES = ["ddp", "ddp_naive", "ddp_bucketed", "ddp_overlapped"]


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("course_lib.timeline.time", SimpleNamespace(perf_counter=clock, time=clock))
    return clock


def made_of(*spans: tuple[str, float, float], began: float = 0.0) -> Timeline:
    timeline = Timeline()
    timeline.began, timeline.spans = began, [Span(*span) for span in spans]
    return timeline


# ---- recording -------------------------------------------------------------------------------------------------------------


def test_spans_begin_and_end_with_their_block(clock):
    clock.now = 100
    timeline = Timeline()
    clock.now = 101
    with timeline.span("outer"):
        clock.now = 102
        with timeline.span("inner"):
            clock.now = 104
        clock.now = 105
    with timeline.span("inner"):
        clock.now = 106
    assert timeline.spans == [("inner", 2, 4), ("outer", 1, 5), ("inner", 5, 6)]
    assert (timeline.total("inner"), timeline.total("outer"), timeline.total("none")) == (3, 4, 0)


def test_a_future_is_followed_until_it_is_done(clock):
    """Also by another one that comes later and is done first."""
    timeline = Timeline()
    first, second = torch.futures.Future(), torch.futures.Future()
    timeline.follow(first, "first")
    clock.now = 1
    timeline.follow(second, "second")
    clock.now = 3
    assert timeline.spans == []
    second.set_result(None)
    clock.now = 7
    first.set_result(None)
    assert timeline.spans == [("second", 1, 3), ("first", 0, 7)]


def test_nothing_is_recorded_once_recording_has_stopped(clock):
    timeline, future = Timeline(), torch.futures.Future()
    with timeline.span("before"):
        clock.now = 1
    timeline.follow(future, "unfinished")
    with timeline.span("unfinished"):
        timeline.recording = False
    with timeline.span("after"):
        pass
    future.set_result(None)
    assert list(timeline.watch([1, 2])) == [1, 2]
    assert timeline.spans == [("before", 0, 1)]


def test_watched_batches_come_unchanged_with_a_span_each(clock):
    def slow():
        for number in (1, 2, 4):
            clock.now += number
            yield number
        clock.now += 100  # the end is no batch

    timeline = Timeline()
    assert list(timeline.watch(slow())) == [1, 2, 4]
    assert timeline.spans == [("load", 0, 1), ("load", 1, 3), ("load", 3, 7)]


def test_a_block_that_fails_is_no_span():
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("failed"):
        raise KeyError
    assert timeline.spans == []


def test_unrecorded_is_a_span_for_nobody():
    with unrecorded("anything"):
        pass


# ---- files, and one clock --------------------------------------------------------------------------------------------------


def test_a_timeline_comes_back_from_its_file(tmp_path):
    """In the order of the spans' starts."""
    made_of(("b", 1.5, 2.25), ("a", 0.125, 3.0), ("c", 2.0, 2.0)).save(tmp_path / "timeline.0.json")
    [timeline] = read_timelines(str(tmp_path))
    assert timeline.spans == [("a", 0.125, 3.0), ("b", 1.5, 2.25), ("c", 2.0, 2.0)]


def test_ranks_are_put_on_the_clock_of_the_earliest(tmp_path):
    """In the order of their numbers, 2 before 10."""
    for rank, began in [(0, 1000.5), (2, 1000.0), (10, 1003.0)]:
        made_of(("forward", 1.0, 2.0 + rank), began=began).save(tmp_path / f"timeline.{rank}.json")
    timelines = read_timelines(tmp_path)
    assert [timeline.spans for timeline in timelines] == [
        [("forward", 1.5, 2.5)],
        [("forward", 1.0, 4.0)],
        [("forward", 4.0, 15.0)],
    ]


def test_a_run_without_a_timeline_says_how_to_get_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no timeline\.<rank>\.json; train with --timeline 10"):
        read_timelines(tmp_path)


def test_a_new_run_under_an_old_name_does_not_show_the_old_ones_timelines(config):
    config = config.replace(max_steps=1)
    fit(config.replace(timeline=1))
    (config.run / "timeline.1.json").write_text((config.run / "timeline.0.json").read_text())  # of a second rank
    fit(config.replace(timeline=1))
    assert len(read_timelines(config.run)) == 1
    fit(config)
    with pytest.raises(FileNotFoundError):
        read_timelines(config.run)


# ---- waiting is told from communication ------------------------------------------------------------------------------------


def test_until_the_last_rank_has_come_the_others_wait():
    early = made_of(("backward", 0, 1), ("communicate", 1, 5), ("communicate", 6, 9))
    late = made_of(("backward", 0, 3), ("communicate", 3, 5), ("communicate", 5, 8))
    early, late = split_waiting([early, late])
    assert sorted(early.spans) == [("backward", 0, 1), ("communicate", 3, 5), ("communicate", 6, 9), ("wait", 1, 3)]
    assert sorted(late.spans) == [("backward", 0, 3), ("communicate", 3, 5), ("communicate", 6, 8), ("wait", 5, 6)]


def test_of_three_ranks_the_last_one_waits_for_nobody():
    timelines = split_waiting([made_of(("communicate", start, 4)) for start in (0, 3, 1)])
    assert [sorted(timeline.spans) for timeline in timelines] == [
        [("communicate", 3, 4), ("wait", 0, 3)],
        [("communicate", 3, 4)],
        [("communicate", 3, 4), ("wait", 1, 3)],
    ]


def test_a_clock_that_is_a_little_off_gives_no_span_that_ends_before_it_starts():
    """By another machine's clock, rank 1 came when rank 0 was done already."""
    early, late = split_waiting([made_of(("communicate", 0, 2)), made_of(("communicate", 3, 4))])
    assert sorted(early.spans) == [("communicate", 3, 3), ("wait", 0, 2)]
    assert late.spans == [("communicate", 3, 4)]


def test_one_rank_alone_never_waits():
    [timeline] = split_waiting([made_of(("communicate", 0, 2), ("forward", 2, 3))])
    assert sorted(timeline.spans) == [("communicate", 0, 2), ("forward", 2, 3)]


# ---- real runs on two ranks ------------------------------------------------------------------------------------------------


def recorded(config: Config) -> list[dict[str, list[Span]]]:
    """What each rank wrote down: its spans by kind, in the order of their starts."""
    ranks = []
    for rank in range(2):
        spans = [Span(*span) for span in json.loads((config.run / f"timeline.{rank}.json").read_text())["spans"]]
        assert spans == sorted(spans, key=lambda span: span.start)
        assert all(0 <= span.start <= span.end for span in spans)
        ranks.append({kind: [span for span in spans if span.kind == kind] for kind in {span.kind for span in spans}})
    return ranks


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_records_as_many_steps_as_told_and_no_more(trained, strategy):
    for spans in recorded(trained[strategy]):
        assert set(spans) == {"load", "forward", "backward", "communicate", "sync", "update"}
        for step in zip(*(spans[kind] for kind in ("load", "forward", "backward", "sync", "update")), strict=True):
            assert all(before.end <= after.start for before, after in pairwise(step))
        assert len(spans["update"]) == 6  # of twelve steps


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_communication_of_a_step_is_between_its_backward_and_its_update(trained, strategy):
    """It begins when backward has begun, and is over when the weights change."""
    for spans in recorded(trained[strategy]):
        steps = [
            [call for call in spans["communicate"] if backward.start <= call.start and call.end <= update.start]
            for backward, update in zip(spans["backward"], spans["update"], strict=True)
        ]
        assert all(steps) and sum(steps, []) == spans["communicate"]


def learned(config: Config) -> int:
    return sum(parameter.requires_grad for parameter in make_model(config, make_task(config)).parameters())


def during_backward(spans: dict[str, list[Span]]) -> list[int]:
    """In each step: how many calls have started before backward ended."""
    return [
        sum(backward.start <= call.start < backward.end for call in spans["communicate"])
        for backward in spans["backward"]
    ]


def test_naive_sends_every_parameter_by_itself_when_backward_is_over(trained):
    for spans in recorded(trained["ddp_naive"]):
        assert len(spans["communicate"]) == 6 * learned(trained["ddp_naive"])
        assert during_backward(spans) == [0] * 6
        assert all(before.end <= after.start for before, after in pairwise(spans["communicate"]))  # one at a time


def test_bucketed_sends_less_often_and_still_when_backward_is_over(trained):
    for spans in recorded(trained["ddp_bucketed"]):
        assert 6 < len(spans["communicate"]) < 6 * learned(trained["ddp_bucketed"])
        assert during_backward(spans) == [0] * 6


def test_overlapped_sends_the_same_buckets_while_backward_goes_on(trained):
    for plain, spans in zip(recorded(trained["ddp_bucketed"]), recorded(trained["ddp_overlapped"]), strict=True):
        assert len(spans["communicate"]) == len(plain["communicate"])
        assert all(during_backward(spans))  # in every step


def test_torchs_own_overlaps_too(trained):
    for spans in recorded(trained["ddp"]):
        assert all(during_backward(spans))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_ranks_are_read_with_their_waiting(trained, strategy):
    """Every call is a meeting: at least one rank of the two does not wait for it; nothing else is touched."""
    raw, timelines = recorded(trained[strategy]), read_timelines(trained[strategy].run)
    for spans, timeline in zip(raw, timelines, strict=True):
        kinds = [span.kind for span in timeline.spans]
        assert kinds.count("communicate") == len(spans["communicate"])
        assert kinds.count("forward") == kinds.count("update") == 6
    waits = [sum(span.kind == "wait" for span in timeline.spans) for timeline in timelines]
    assert sum(waits) <= len(raw[0]["communicate"])
    meetings = [[span.start for span in timeline.spans if span.kind == "communicate"] for timeline in timelines]
    assert meetings[0] == pytest.approx(meetings[1])


def test_the_share_of_one_kind_during_another_counts_each_rank_by_itself():
    first, second = Timeline(), Timeline()
    first.spans = [Span("backward", 0, 4), Span("communicate", 3, 5), Span("communicate", 6, 7)]  # 1 of 3
    second.spans = [Span("backward", 3, 7), Span("communicate", 4, 5), Span("load", 0, 9)]  # all of 1
    assert share_during([first, second], "communicate", "backward") == pytest.approx(2 / 4)
    assert share_during([first], "wait", "backward") == 0


def test_ranks_that_take_turns_never_compute_at_once():
    first, second = Timeline(), Timeline()
    first.spans = [Span("forward", 0, 2), Span("wait", 2, 8), Span("backward", 8, 12)]
    second.spans = [Span("wait", 0, 2), Span("forward", 2, 4), Span("backward", 4, 8)]
    assert at_once(first, second) == 0
    second.spans = [Span("forward", 1, 3), Span("backward", 8, 12)]
    assert at_once(first, second) == pytest.approx(2 * 5 / 12) and at_once(first, first) == 1
