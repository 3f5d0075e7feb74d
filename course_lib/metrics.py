"""Numbers that are true on any number of ranks, and the log that every plot reads.

runs/<name>/metrics.jsonl holds one JSON object a line, appended and flushed, readable while the run goes on:

    {"event": "start", "time": …, "config": {…}, "world_size": …, "nodes": …, "step": …, "steps": …, "device": …, …}
    {"event": "step",  "time": …, "step": …, "epoch": …, "loss": …, "lr": …, "samples_per_s": …, "wait_share": …}
    {"event": "eval",  "time": …, "step": …, "epoch": …, "loss": …, "rmse": {variable: …} or "iou": … or …, "count": …}
    {"event": "stop",  "time": …, "step": …}
    {"event": "end",   "time": …, "step": …, "seconds": …, "max_rss_mb": …, "real_s": …, "user_s": …, …}

time is in seconds since 1970. A step's loss is that of rank 0's batch, an evaluation's that of all samples on all ranks.
A run that is told to stop before its end saves and says so; one that is resumed starts again and writes some steps again, of
which the last counts. max_rss_mb is the memory of the largest rank. real_s, user_s and system_s are what the shell's `time`
would tell, from the start of the processes on: the clock on the wall, and the CPU seconds of all ranks.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Self

import psutil
import torch
import torch.distributed as dist

from course_lib.world import World


def sum_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """Add up every rank's values. Means are made from sums and counts afterwards: shards may be uneven."""
    if world.world_size > 1:
        values = values.to(world.device)
        dist.all_reduce(values)
    return values.cpu()


def max_rss_mb(world: World) -> float:
    """The most memory that the largest rank has had, in megabytes: what Slurm's accounting calls MaxRSS."""
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    ranks = torch.zeros(world.world_size)
    ranks[world.rank] = mine
    return float(sum_over_ranks(ranks, world).max())


def process_times(world: World) -> dict[str, float]:
    """Seconds since this process was started; of CPU, what all ranks have computed so far, and the system for them."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    user, system = sum_over_ranks(torch.tensor([mine.ru_utime, mine.ru_stime]), world).tolist()
    return {"real_s": time.time() - psutil.Process().create_time(), "user_s": user, "system_s": system}


def count_nodes(world: World) -> int:
    """Nodes that the ranks are on: each has one whose local rank is 0."""
    return round(float(sum_over_ranks(torch.tensor([float(world.local_rank == 0)]), world)))


class Log:
    """Appends to metrics.jsonl on rank 0; a silent stand-in on the others."""

    def __init__(self, path: Path, world: World):
        self.file = None
        if world.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab+")
            if self.file.tell() and self._last_byte() != b"\n":  # a killed run may have left half a line
                self.file.write(b"\n")

    def _last_byte(self) -> bytes:
        self.file.seek(-1, os.SEEK_END)
        return self.file.read(1)

    def write(self, event: str, **fields) -> None:
        if self.file:
            self.file.write(json.dumps({"event": event, "time": time.time(), **fields}).encode() + b"\n")
            self.file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        if self.file:
            self.file.close()


def read_log(run: str | Path, *, repeats: bool = False) -> list[dict]:
    """A run's events in order; half-written lines are left out, and of a step written twice the last one counts.

    With `repeats` all are there: what was lost when the run was killed, and what was done again.
    """
    events: dict[tuple, dict] = {}
    for number, line in enumerate((Path(run) / "metrics.jsonl").read_text().splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        key = (event["event"], event.get("step"), repeats and number)
        events.pop(key, None)
        events[key] = event
    return list(events.values())
