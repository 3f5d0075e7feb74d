"""What happened when: spans of time, recorded from whatever thread they happen in."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Span(NamedTuple):
    """One stretch of work, in seconds from the timeline's start."""

    kind: str
    start: float
    end: float


class Timeline:
    """A list of spans. Appending is atomic in Python, so threads need no lock."""

    def __init__(self):
        self.zero = time.perf_counter()
        self.spans: list[Span] = []

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record how long the block takes."""
        start = time.perf_counter() - self.zero
        yield
        self.spans.append(Span(kind, start, time.perf_counter() - self.zero))

    def watch(self, batches: Iterable, kind: str = "load") -> Iterator:
        """Pass batches on and record how long each one took to come."""
        iterator = iter(batches)
        while True:
            with self.span(kind):
                batch = next(iterator, None)
            if batch is None:
                self.spans.pop()  # the end is no batch
                return
            yield batch

    def total(self, kind: str) -> float:
        """Seconds spent on one kind of work."""
        return sum(span.end - span.start for span in self.spans if span.kind == kind)
