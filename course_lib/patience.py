"""When ranks of a trial (trial.py) are given up: not by the clock alone, for on a busy machine a good answer takes long, too."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from course_lib.trial_rank import Failure, read_outcomes

IDLE = 0.05  # of a core: what all ranks together need to wait for each other


def wait(folder: Path, codes: Callable[[], list], seconds: float) -> None:
    """Until all ranks have ended, or get nowhere: then all write down where they are, and have a second for that.

    When one has failed the rest have two seconds, for they may be waiting for it.
    """
    until, watch = None, None
    while None in codes() and (until is None or time.monotonic() < until):
        time.sleep(0.01)
        if until is None:
            ranks = _pids(folder)
            if any(path.stat().st_size for path in folder.glob("stacks.*")):
                until = time.monotonic() + 1
            elif any(isinstance(outcome, Failure) for outcome in read_outcomes(folder, len(codes())).values()):
                until = time.monotonic() + 2
            elif len(ranks) == len(codes()) and (watch := watch or _Watch(ranks, seconds)).is_over():
                for rank in ranks:
                    with suppress(ProcessLookupError):
                        os.kill(rank, signal.SIGUSR2)


def _pids(folder: Path) -> list[int]:
    """Of the ranks that have met."""
    found = [path.read_text() for path in folder.glob("joined.*")]
    return [int(pid) for pid in found if pid]


class _Watch:
    """Ranks get nowhere if one has computed for so many seconds, or if all of them hardly did for as long."""

    def __init__(self, ranks: list[int], seconds: float):
        self.ranks, self.seconds = ranks, seconds
        self.used = dict.fromkeys(ranks, 0.0)
        self.began = self._measure()
        self.since, self.before = time.monotonic(), 0.0

    def _measure(self) -> dict[int, float]:
        """Seconds of a core that each has used; of one that has ended, what it had."""
        found = dict(self.used)
        for rank in self.ranks:
            with suppress(psutil.Error):
                times = psutil.Process(rank).cpu_times()
                found[rank] = times.user + times.system
        return found

    def is_over(self) -> bool:
        self.used = self._measure()
        used = [self.used[rank] - self.began[rank] for rank in self.ranks]
        if sum(used) - self.before > IDLE * self.seconds:
            self.since, self.before = time.monotonic(), sum(used)
        return max(used) > self.seconds or time.monotonic() - self.since > self.seconds
