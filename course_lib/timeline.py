"""What happened when: spans of time, recorded from whatever thread they happen in, kept in a file a rank.

    {"zero": seconds since 1970, "spans": [[kind, start, end], …]}

Nothing is made to wait for the sake of the clock, so what overlaps still overlaps. On a GPU the spans are those of the CPU,
which only launches the work: look at the device itself with torch.profiler.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple


class Span(NamedTuple):
    """One stretch of work, in seconds from the timeline's start."""

    kind: str
    start: float
    end: float


def unrecorded(kind: str) -> nullcontext:
    """In the place of Timeline.span where nobody wants to know."""
    return nullcontext()


class Timeline:
    """A list of spans. Appending is atomic in Python, so threads need no lock."""

    def __init__(self):
        self.zero = time.perf_counter()
        self.began = time.time()
        self.spans: list[Span] = []
        self.recording = True

    def _now(self) -> float:
        return time.perf_counter() - self.zero

    def _add(self, kind: str, start: float) -> None:
        if self.recording:
            self.spans.append(Span(kind, start, self._now()))

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record how long the block takes."""
        start = self._now()
        yield
        self._add(kind, start)

    def follow(self, future, kind: str) -> None:
        """Record how long it takes from now until a future of torch is done."""
        start = self._now()
        future.add_done_callback(lambda _: self._add(kind, start))

    def watch(self, batches: Iterable, kind: str = "load") -> Iterator:
        """Pass batches on and record how long each one took to come."""
        iterator = iter(batches)
        while True:
            start = self._now()
            batch = next(iterator, None)
            if batch is None:
                return
            self._add(kind, start)
            yield batch

    def total(self, kind: str) -> float:
        """Seconds spent on one kind of work."""
        return sum(span.end - span.start for span in self.spans if span.kind == kind)

    def save(self, path: Path) -> None:
        """Write it down for read_timelines."""
        path.write_text(json.dumps({"zero": self.began, "spans": sorted(self.spans, key=lambda span: span.start)}))


def read_timelines(run: str | Path) -> list[Timeline]:
    """The timelines of all ranks of a run, on one clock, with the waiting for other ranks told from communication."""
    paths = sorted(Path(run).glob("timeline.*.json"), key=lambda path: int(path.suffixes[-2][1:]))
    if not paths:
        raise FileNotFoundError(f"{run} has no timeline.<rank>.json; train with --timeline 10 to record one")
    contents = [json.loads(path.read_text()) for path in paths]
    zero = min(content["zero"] for content in contents)
    timelines = []
    for content in contents:
        timeline = Timeline()
        late = content["zero"] - zero
        timeline.spans = [Span(kind, start + late, end + late) for kind, start, end in content["spans"]]
        timelines.append(timeline)
    return split_waiting(timelines)


def split_waiting(timelines: Sequence[Timeline]) -> list[Timeline]:
    """All ranks communicate in the same order, and only when the last one has come: until then the others wait."""
    calls = [[span for span in timeline.spans if span.kind == "communicate"] for timeline in timelines]
    meetings = [max(span.start for span in spans) for spans in zip(*calls)]
    for timeline, spans in zip(timelines, calls):
        others = [span for span in timeline.spans if span.kind != "communicate"]
        waits = [Span("wait", span.start, min(met, span.end)) for span, met in zip(spans, meetings) if span.start < met]
        works = [Span("communicate", max(span.start, met), max(span.end, met)) for span, met in zip(spans, meetings)]
        timeline.spans = others + waits + works + spans[len(meetings) :]  # recording may have stopped in between
    return list(timelines)


def idle_share(timelines: Sequence[Timeline]) -> float:
    """The part of all ranks' time in which they wait, of that in which they wait or compute."""
    waiting, working = (
        sum(each.total(kind) for each in timelines for kind in kinds) for kinds in (("wait",), ("forward", "backward"))
    )
    return waiting / (waiting + working)


def at_once(one: Timeline, other: Timeline) -> float:
    """The part of two ranks' computing in which both of them compute: 0 if they take turns."""
    spans = [[span for span in each.spans if span.kind in ("forward", "backward")] for each in (one, other)]
    both = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in spans[0] for b in spans[1])
    return 2 * both / sum(span.end - span.start for span in spans[0] + spans[1])


def share_during(timelines: Sequence[Timeline], kind: str, other: str) -> float:
    """The part of all time of one kind, on all ranks, in which the same rank was also busy with another kind."""
    spans = [(each, [s for s in each.spans if s.kind == other]) for each in timelines]
    both = sum(
        max(0.0, min(a.end, b.end) - max(a.start, b.start))
        for each, others in spans
        for a in each.spans
        if a.kind == kind
        for b in others
    )
    return both / (sum(each.total(kind) for each in timelines) or 1.0)
