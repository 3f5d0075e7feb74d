"""Pipeline schedules on paper: who does what when, if nothing but computing takes time."""

from collections.abc import Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """One stage's work on one micro-batch."""

    kind: str  # "forward" or "backward"
    number: int
    start: float
    end: float


def order(name: str, stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage does in which order.

    gpipe  all forward, then all backward, the last first
    1f1b   as few forward as the stages behind it need to be busy, then one forward and one backward in turn
    """
    forward, backward = ([(kind, n) for n in range(micro_batches)] for kind in ("forward", "backward"))
    if name == "gpipe":
        return forward + backward[::-1]
    ahead = min(stages - stage - 1, micro_batches)
    turns = [slot for pair in zip(forward[ahead:], backward) for slot in pair]
    return forward[:ahead] + turns + backward[micro_batches - ahead :]


def plan(
    name: str, micro_batches: int, costs: Sequence[float], *, backward: Sequence[float] | None = None
) -> list[list[Slot]]:
    """Every stage's slots. costs: each stage's time for one micro-batch in forward; in backward twice that, or as told."""
    stages = len(costs)
    times = {"forward": costs, "backward": backward or [2 * cost for cost in costs]}
    todo = [order(name, stage, stages, micro_batches) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}  # (kind, micro-batch, stage) → when
    found: list[list[Slot]] = [[] for _ in costs]
    while any(todo):
        for stage, waiting in enumerate(todo):
            while waiting:
                kind, number = waiting[0]
                after = stage - 1 if kind == "forward" else stage + 1  # who must be done with it first
                if 0 <= after < stages and (kind, number, after) not in done:
                    break
                mine = found[stage][-1].end if found[stage] else 0.0
                start = max(mine, done.get((kind, number, after), 0.0))
                end = start + times[kind][stage]
                found[stage].append(Slot(kind, number, start, end))
                done[kind, number, stage] = end
                waiting.pop(0)
    return found


def idle(plan: Sequence[Sequence[Slot]]) -> float:
    """The share of all stages' time in which nothing is done."""
    busy = sum(slot.end - slot.start for stage in plan for slot in stage)
    return 1 - busy / (len(plan) * max(slot.end for stage in plan for slot in stage))


def in_flight(stage: Sequence[Slot]) -> int:
    """How many micro-batches' activations a stage must keep at the same time."""
    kept = [sum(1 if slot.kind == "forward" else -1 for slot in stage[: n + 1]) for n in range(len(stage))]
    return max(kept)
