"""Measure what the course claims about pipelines and sharding, side by side with the peers it claims it against.

    python -m benchmarks.parallel                   # everything: six minutes
    python -m benchmarks.parallel --quick           # small and short: it shows that all runs; its numbers are no claims
    python -m benchmarks.parallel --only bubble     # one part: bubble, memory or pipelines
    python -m benchmarks.parallel --json FILE       # the table as JSON too

bubble     the share of its step in which a rank of our 2-stage GPipe idles, predicted and measured, by the number m of
           micro-batches. Predicted in two ways: by the formula (p − 1)/(m + p − 1), as if all stages took equally long; and by
           `plan` from what each stage takes in forward and in backward, measured in the same round without a message, both
           ranks at once.
           Measured: 1 − (seconds in forward and backward, of both ranks)/(2 × seconds of the step). So messages, barriers
           and the wait for a slower stage are idle time. The clock on the wall counts, here and in what the stages take: when
           another program has the core of a rank that computes, the rank still computes and the other waits for it. CPU
           seconds would call the first idle too. The median over the rounds counts; a difference is taken within a round, and
           "off by" is the largest one over all m.
           On a busy machine all idle more than is predicted: every message wakes somebody up, who first has to get a core.
memory     what a rank of fsdp keeps between two steps, against one of ddp: weights, gradients and Adam's averages, counted, and
           by ZeRO's formula; and how much its process really grows: its private memory (USS) after some steps, and its
           resident memory at the peak. A tiny model trains before; what that loads and sets up is not counted. The peak of
           fsdp has the whole model in it, which every rank makes before it is shared out, and whole blocks while they are
           needed. "As it comes" glibc keeps some of what is freed, in holes that nothing fits into; "freed at once" it gives
           every large block back. The worst rank counts.
pipelines  steps a second of the trainer's pipelines on 2 ranks, same stages, same micro-batches: our GPipe against torch's.
           The ratio is taken within each round, and the median over the rounds counts.

One thread computes on each rank. Those who are compared take turns.
"""

import collections
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import table
from benchmarks.table import Row, compare
from course_lib.launch import torchrun
from course_lib.parallel.pipeline import bubble
from course_lib.parallel.schedules import idle, plan

MEBI = 2**20
STAGES = 2
OURS, GPIPE, ONE_F_ONE_B = "pipeline_naive", "pipeline_gpipe", "pipeline_1f1b"
PEERS = {GPIPE: "torch ScheduleGPipe", ONE_F_ONE_B: "torch Schedule1F1B"}
ALLOCATORS = {"as it comes": {}, "freed at once": {"MALLOC_MMAP_THRESHOLD_": "65536"}}  # glibc's large blocks
TINY = {"width": 2, "depth": 1, "size": 16, "steps": 2, "rounds": 2}


def ask_ranks(folder: Path, n: int, part: str, *, environment: dict | None = None, **options) -> list[dict]:
    """What each of n fresh ranks finds."""
    file = folder / "ranks.json"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    torchrun(n, ["-m", "benchmarks.parallel_ranks", part, file, *flags], quiet=True, environment=environment)
    return json.loads(file.read_text())


def idle_shares(ranks: list[dict], micro_batches: int) -> dict[str, list[float]]:
    """Measured and predicted, one number a round."""
    found = {"measured": [], "formula": [], "plan": []}
    loops = ("pipeline", "apart")
    for pipeline, apart in zip(*(zip(*(rank[f"{one} {micro_batches}"] for rank in ranks)) for one in loops)):
        step = max(turn["step"] for turn in pipeline)
        busy = sum(turn["forward"] + turn["backward"] for turn in pipeline)
        found["measured"].append(1 - busy / (len(ranks) * step))
        found["formula"].append(bubble(len(ranks), micro_batches))
        forward, backward = ([turn[way] / micro_batches for turn in apart] for way in ("forward", "backward"))
        found["plan"].append(idle(plan("gpipe", micro_batches, forward, backward=backward)))
    return found


def measure_bubble(folder: Path, *, quick: bool) -> Iterator[Row]:
    counts = (1, 2) if quick else (1, 2, 4, 8)
    cases = (  # cut by their parameters, as split does: two stages that take about equally long, and two that do not
        {"width": 32, "depth": 1, "size": 64, "steps": 1, "rounds": 11},
        {"width": 16, "depth": 2, "size": 64, "steps": 1, "rounds": 11},
    )
    for case in (TINY,) if quick else cases:
        ranks = ask_ranks(folder, STAGES, "bubble", **case, micro_batches=",".join(map(str, counts)))
        net = "{width} wide, {depth} deep".format(**case)
        differences = collections.defaultdict(list)
        for count in counts:
            shares = idle_shares(ranks, count)
            measured = shares.pop("measured")
            for name, predicted in shares.items():
                what = f"idle, {net}, m = {count}, {name}"
                yield Row(what, statistics.median(predicted), "measured", statistics.median(measured))
                differences[name].append(abs(statistics.median(p - m for p, m in zip(predicted, measured))))
        for name, found in differences.items():
            goal = None if name == "formula" and case["depth"] > 1 else ("<=", 0.1)  # it is for equal stages
            yield Row(f"idle, {net}, off by, {name}", max(found), "1 step", 1.0, goal)


def kept_memory(folder: Path, n: int, *, quick: bool, environment: dict) -> dict[str, dict[str, float]]:
    """MiB of the worst rank of ddp and of fsdp; where it counts, each has fresh ranks."""
    options = {"width": 8 if quick else 256, "depth": 2, "size": 8, "batch": 2, "steps": 3}
    worst = {}
    for names in ("ddp,fsdp",) if quick else ("ddp", "fsdp"):
        ranks = ask_ranks(folder, n, "memory", environment=environment, strategies=names, **options)
        for name, found in ranks[0].items():
            worst[name] = {key: max(1e-2, *(rank[name][key] / MEBI for rank in ranks)) for key in found}
    return worst


def measure_memory(folder: Path, *, quick: bool) -> Iterator[Row]:
    for n in (2,) if quick else (2, 4):
        what, grown = f"MiB a rank of {n}", {}
        for label, environment in list(ALLOCATORS.items())[: 1 if quick else None]:
            grown[label] = kept_memory(folder, n, quick=quick, environment=environment)
        ddp, fsdp = (next(iter(grown.values()))[name] for name in ("ddp", "fsdp"))
        yield Row(f"{what}, fsdp, counted", fsdp["counted"], "ddp", ddp["counted"], ("<=", 1.1 / n))
        yield Row(f"{what}, fsdp, counted", fsdp["counted"], "ZeRO's formula, stage 3", fsdp["stage 3"])
        yield Row(f"{what}, ddp, counted", ddp["counted"], "ZeRO's formula, stage 0", ddp["stage 0"])
        for label, found in grown.items():
            for key in ("private", "peak"):
                yield Row(f"{what}, fsdp, {key}, {label}", found["fsdp"][key], "ddp", found["ddp"][key])


def measure_pipelines(folder: Path, *, quick: bool) -> Iterator[Row]:
    case = TINY if quick else {"width": 16, "depth": 2, "size": 64, "steps": 2, "rounds": 19}
    for count in (2,) if quick else (4, 8):
        names = ",".join([OURS, *PEERS])
        seconds = ask_ranks(folder, STAGES, "pipelines", **case, strategies=names, micro_batches=count)[0]
        rates = {name: [1 / s for s in values] for name, values in seconds.items()}
        for name, peer in PEERS.items():
            goal = (">=", 0.9) if name == GPIPE else None
            yield compare(f"steps/s, our GPipe, {count} micro-batches", rates[OURS], peer, rates[name], goal)


PARTS = {"bubble": measure_bubble, "memory": measure_memory, "pipelines": measure_pipelines}


if __name__ == "__main__":
    table.main("benchmarks.parallel", __doc__, PARTS)
