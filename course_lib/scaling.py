"""How much faster more ranks are: from the logs of runs that differ in nothing else.

python -m course_lib.scaling runs/sweep-1234     # a table, and scaling.png beside the runs
"""

import argparse
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from course_lib import plots
from course_lib.cockpit import Table
from course_lib.config import Parser, UserError, run_main
from course_lib.metrics import read_log


def samples_per_s(events: list[dict]) -> float:
    """A run's speed on all ranks together: the median over its log, without the first line, which warms up."""
    speeds = [event["samples_per_s"] for event in events if event["event"] == "step"]
    return statistics.median(speeds[1:] or speeds)


def measure(runs: list[Path]) -> list[dict]:
    """Speed, speed-up and efficiency of finished runs, by rising number of ranks, relative to the fewest."""
    rows = []
    for run in runs:
        events = read_log(run)
        last = {event["event"]: event for event in events}
        if "end" not in last:
            raise UserError(f"{run} has not come to its end; look at its log, or leave it out")
        speed = samples_per_s(events)
        rows.append({"ranks": last["start"]["world_size"], "samples_per_s": speed, "loss": last["eval"]["loss"]})
    rows.sort(key=lambda row: row["ranks"])
    for row in rows:
        row["speed_up"] = row["samples_per_s"] / rows[0]["samples_per_s"] * rows[0]["ranks"]
        row["efficiency"] = row["speed_up"] / row["ranks"]
    return rows


def show(rows: list[dict]) -> Table:
    titles = ("ranks", "samples/s", "speed-up", "efficiency", "validation loss")
    cells = [
        (r["ranks"], f"{r['samples_per_s']:.1f}", f"{r['speed_up']:.2f}", f"{r['efficiency']:.0%}", f"{r['loss']:.4f}")
        for r in rows
    ]
    return Table(titles, cells)


def main() -> int:
    parser = Parser(prog="python -m course_lib.scaling", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the runs, a folder each")
    folder = parser.parse_args().folder
    runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    if not runs:
        raise UserError(f"{folder} holds no runs; slurm/sweep.sh 1,2,4 makes some")
    rows = measure(runs)
    print(show(rows))
    plots.speed_up(rows)
    plt.savefig(folder / "scaling.png", dpi=120)
    print(f"done: {folder / 'scaling.png'}")
    return 0


if __name__ == "__main__":
    run_main(main)
