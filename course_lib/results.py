"""From the logs of runs that differ in their ranks and seeds to rows, speed-ups and a table."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from course_lib.cockpit import Table
from course_lib.config import UserError
from course_lib.metrics import read_log
from course_lib.scaling import efficiency
from course_lib.scores import NAMES


def samples_per_s(events: list[dict]) -> float:
    """A run's speed on all ranks together: the median over its log, without the first line, which warms up."""
    speeds = [event["samples_per_s"] for event in events if event["event"] == "step"]
    return statistics.median(speeds[1:] or speeds)


def attempts(events: list[dict]) -> list[list[dict]]:
    """The log cut at each start: a run that was interrupted has several. What lies between two of them was no work."""
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    return [events[first:last] for first, last in zip(starts, [*starts[1:], None])]


def seconds_of(attempt: list[dict]) -> float:
    return attempt[-1]["time"] - attempt[0]["time"]


def seconds_to(events: list[dict], reached: Callable[[dict], bool]) -> float | None:
    """Seconds of work until an evaluation is good enough."""
    spent = 0.0
    for attempt in attempts(events):
        for event in attempt:
            if event["event"] == "eval" and reached(event):
                return spent + event["time"] - attempt[0]["time"]
        spent += seconds_of(attempt)
    return None


def row_of(run: Path) -> dict:
    """What one finished run measured."""
    events = read_log(run)
    last = {event["event"]: event for event in events}
    if "end" not in last:
        raise UserError(f"{run} has not come to its end; look at its log, or leave it out")
    start, config = last["start"], last["start"]["config"]
    row = {"strategy": config["strategy"], "ranks": start["world_size"], "seed": config["seed"], "run": run}
    before = attempts(read_log(run, repeats=True))[:-1]  # they were paid for too
    seconds = last["end"]["seconds"] + sum(map(seconds_of, before))
    row |= {"nodes": start.get("nodes", 1), "batch": config["batch"]}
    row |= {"samples_per_s": samples_per_s(events), "seconds": seconds}
    return row | {name: last["eval"][name] for name in ("loss", *NAMES) if name in last["eval"]}


def collect(folder: Path) -> list[dict]:
    """A row for each finished run below a folder; those that are still under way are left out."""
    runs = sorted(path.parent for path in Path(folder).glob("*/metrics.jsonl"))
    return [row_of(run) for run in runs if any(event["event"] == "end" for event in read_log(run))]


def summarise(rows: Sequence[dict]) -> list[dict]:
    """One row for each strategy and number of ranks: means over seeds, and how far the seeds stray (standard deviation).

    Speed-up and efficiency are relative to the fewest ranks of the same strategy, and stray with those as well.
    """
    groups = defaultdict(list)
    for row in rows:
        groups[row["strategy"], row["ranks"]].append(row)
    found, first = [], {}
    for (strategy, ranks), several in sorted(groups.items()):
        row = {"strategy": strategy, "ranks": ranks, "seeds": len(several)}
        row |= {name: several[0][name] for name in ("nodes", "batch")}
        for name in ("samples_per_s", "seconds", "loss", *NAMES):
            if values := [one[name] for one in several if name in one]:
                row[name] = statistics.fmean(values)
                row[f"{name}_spread"] = statistics.stdev(values) if len(values) > 1 else 0.0
        base = first.setdefault(strategy, row)
        row["speed_up"] = row["samples_per_s"] / base["samples_per_s"] * base["ranks"]
        astray = [one["samples_per_s_spread"] / one["samples_per_s"] for one in (base, row)]
        row["speed_up_spread"] = row["speed_up"] * math.hypot(*astray) if row is not base else 0.0
        row["efficiency"] = efficiency(row["speed_up"], ranks)
        found.append(row)
    return found


def to_target(rows: Sequence[dict], reached: Callable[[dict], bool]) -> dict[int, list[float | None]]:
    """{ranks: the seconds that each run needed until an evaluation was good enough}; None: it never was."""
    needed = defaultdict(list)
    for row in rows:
        needed[row["ranks"]].append(seconds_to(read_log(row["run"], repeats=True), reached))
    return dict(needed)


def show(rows: Sequence[dict]) -> Table:
    """The rows as a table; ± is the spread over seeds, where there are several."""

    def shown(row: dict, name: str, digits: int) -> str:
        spread = f" ± {row[f'{name}_spread']:.{digits}f}" if row["seeds"] > 1 else ""
        return f"{row[name]:.{digits}f}{spread}"

    judged = next((name for name in NAMES if all(name in row for row in rows)), "loss")
    titles = ("strategy", "ranks", "seeds", "samples/s", "speed-up", "efficiency", "seconds")
    cells = [
        (
            row["strategy"],
            row["ranks"],
            row["seeds"],
            shown(row, "samples_per_s", 1),
            f"{row['speed_up']:.2f}",
            f"{row['efficiency']:.0%}",
            f"{row['seconds']:.1f}",
            shown(row, judged, 4),
        )
        for row in rows
    ]
    return Table((*titles, NAMES.get(judged, "validation loss")), cells)
