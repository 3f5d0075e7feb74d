"""What a run makes sure of: batches that all ranks can share, losses that are numbers, and nothing of an older run lost."""

import math
import os
import shutil
from pathlib import Path

from course_lib.checkpoint import State
from course_lib.config import Config, UserError
from course_lib.data.batches import Batches
from course_lib.metrics import read_log
from course_lib.world import World


def share_batch(config: Config, world: World) -> Config:
    """With --global-batch every rank takes its equal part of that."""
    if config.global_batch % world.world_size:
        raise UserError(
            f"--global-batch {config.global_batch} can't be shared evenly by {world.world_size} ranks; "
            f"try {config.global_batch // world.world_size * world.world_size or world.world_size}"
        )
    return config.replace(batch=config.global_batch // world.world_size or config.batch)


def require_all_batches(batches: Batches, state: State, world: World) -> None:
    """A rank that goes on alone would leave the others waiting for its gradients."""
    if left := (batches.samples - state.seen) // batches.global_batch:
        raise UserError(
            f"the loader of rank {world.rank} ended {left} batches early in epoch {state.epoch}: every rank must have as "
            "many as the others; look at its part of the data"
        )


def require_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} at step {step}: lower --lr, or look at the data")


def set_aside(run: Path, launch: str) -> None:
    """A new run under an old name: keep the old log, checkpoint, timelines and what Lightning left as *.previous."""
    if launch and launch == launch_of_log(run):  # begun again before its first checkpoint: they are there already
        return
    for path in (run / "metrics.jsonl", run / "checkpoint.pt", run / "lightning", *run.glob("timeline.*.json")):
        if path.exists():
            if path.is_dir():  # a folder can't be renamed over another one
                shutil.rmtree(f"{path}.previous", ignore_errors=True)
            os.replace(path, f"{path}.previous")


def launch_of_log(run: Path) -> str:
    """The launch that wrote a log; "" where there is none, or none that can be read."""
    try:
        return [event["launch"] for event in read_log(run) if event["event"] == "start"][-1]
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return ""
