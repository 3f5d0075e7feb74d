"""The same training on 1, 2, 4, … ranks and with several seeds: one call runs the grid, and may be interrupted at any time.

    sweep.run(Config(name="weak", strategy="ddp", …), ranks=[1, 2, 4], seeds=[0, 1, 2])

python -m course_lib.sweep --ranks 1,2,4 --seeds 0,1,2 --name weak --strategy ddp --batch 8     # the same in a terminal
slurm/sweep.sh 1,2,4 --seeds 0,1,2 --name weak --batch 8                                        # the same as Slurm jobs

Every run has a folder with its own metrics.jsonl below runs/weak/. Called again, it leaves out what is done and goes on with
what was cut off.
"""

import argparse
import base64
import io
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import HTML, display

from course_lib import plots, processes
from course_lib.config import Config, Parser, UserError, run_main
from course_lib.failures import RanksError
from course_lib.launch import torchrun
from course_lib.metrics import read_log
from course_lib.progress import has_bar
from course_lib.results import collect, row_of, show, summarise
from course_lib.scheduler import call
from course_lib.submission import ROOT, SITE

Points = Sequence[tuple[int, Config]]


def grid(config: Config, ranks: Sequence[int], seeds: Sequence[int]) -> list[tuple[int, Config]]:
    """(number of ranks, config) of each run; together they live in the folder that the config names."""
    return [
        (n, config.replace(runs=str(config.run), name=f"{config.strategy}-{n}-ranks-seed-{seed}", seed=seed))
        for n in ranks
        for seed in seeds
    ]


def run(
    config: Config, ranks: Sequence[int], seeds: Sequence[int] = (0,), *, slurm: bool = False, srun: bool = False
) -> list[dict]:
    """Run what is not done yet, and return a row for each number of ranks. In Lab the table fills itself.

    The runs follow each other on this machine, or inside a Slurm job by srun; with `slurm` they are Slurm jobs.
    """
    points = grid(config, ranks, seeds)
    board = _Board(points)
    if slurm and not all(is_done(one) for _, one in points):
        _wait(submit(config, ranks, seeds), points, board)
    for n, one in points:
        if not is_done(one):
            board.say(f"{one.name} starts")
            start = _by_srun if srun else _here
            start(n, one.replace(resume=(one.run / "checkpoint.pt").exists()))
            board.update()
    return summarise([row_of(one.run) for _, one in points])


def is_done(config: Config) -> bool:
    """Has this run come to its end? One of the same name with other settings is a mistake."""
    try:
        events = read_log(config.run)
    except FileNotFoundError:
        return False
    last = {event["event"]: event for event in events}
    was, wanted = _essence(last.get("start", {}).get("config", {})), _essence(vars(config))
    for name in sorted(was.keys() & wanted.keys()):
        if was[name] != wanted[name]:
            flag = f"--{name.replace('_', '-')} {was[name]}, not {wanted[name]}"
            raise UserError(f"{config.run} ran with {flag}: choose another --name, or delete it")
    return "end" in last and last["end"]["step"] >= last["start"]["steps"]


def _essence(settings: dict) -> dict:
    """What makes a run: not where it is or how often it began, and of the data only which it is."""
    kept = {name: value for name, value in settings.items() if name not in ("runs", "name", "resume")}
    if "data" in kept:
        kept["data"] = Path(kept["data"]).name  # relative to here, or to there
    if kept.get("global_batch"):
        del kept["batch"]  # it is the global batch's part
    return kept


class _Board:
    """The table and the figure so far: a display that changes in Lab, a line a run elsewhere."""

    def __init__(self, points: Points):
        self.points = points
        self.handle = display(self.view(), display_id=True) if has_bar() else None

    def view(self) -> HTML:
        rows = summarise([row_of(one.run) for _, one in self.points if is_done(one)])
        text = f"<p>{sum(row['seeds'] for row in rows)} of {len(self.points)} runs are done</p>"
        if rows:
            picture, figure = io.BytesIO(), plots.draw_speed_up(rows)
            figure.savefig(picture, dpi=80)
            plt.close(figure)
            code = base64.b64encode(picture.getvalue()).decode()
            text += f'{show(rows)._repr_html_()}<img src="data:image/png;base64,{code}">'
        return HTML(text)

    def update(self) -> None:
        if self.handle:
            self.handle.update(self.view())

    def say(self, text: str) -> None:
        if not self.handle:
            print(text, flush=True)


# ---- three ways to start ranks ---------------------------------------------------------------------------------------------


def _here(n: int, config: Config) -> None:
    torchrun(n, config, quiet=True)


def _by_srun(n: int, config: Config) -> None:
    """Inside a Slurm job: as many tasks as the run has ranks."""
    command = ["srun", "--label", "--kill-on-bad-exit=1", f"--ntasks={n}", "slurm/rank_env.sh"]
    done = subprocess.run([*command, "python", "-m", "course_lib.train", *config.arguments()], check=False)
    if done.returncode:  # its own words are in the job's log already
        sys.exit(done.returncode)


def submit(config: Config, ranks: Sequence[int], seeds: Sequence[int]) -> list[str]:
    """slurm/sweep.sh: a job for each number of ranks. Returns their numbers."""
    whole = config.replace(runs=str(Path(config.runs).resolve()), data=str(Path(config.data).resolve()))
    lists = [",".join(map(str, several)) for several in (ranks, seeds)]
    names = [f"--name={config.name}", f"--strategy={config.strategy}"]  # also where they are the defaults
    words = ["slurm/sweep.sh", lists[0], f"--seeds={lists[1]}", *whole.arguments(), *names]
    code, printed = processes.run(["bash", "-c", SITE, str(ROOT), *words], timeout=60)
    numbers = re.search(r"jobs ([\d ]+) train on", printed)
    if code or not numbers:
        raise UserError(f"slurm/sweep.sh: {processes.failure(code, printed, 60)}")
    return numbers[1].split()


def _wait(jobs: list[str], points: Points, board: _Board) -> None:
    """Until all runs are done; jobs that end without them have failed."""
    board.say(f"queued: jobs {', '.join(jobs)}")
    while not all(is_done(one) for _, one in points):
        code, printed = call("squeue", "--noheader", f"--jobs={','.join(jobs)}")
        if (code == 0 and not printed.strip()) or "Invalid job id" in printed:
            time.sleep(2)  # the last lines may still be on their way to this machine
            if left := [one.name for _, one in points if not is_done(one)]:
                raise RanksError(f"jobs {', '.join(jobs)} have ended without {left[0]}: look at runs/sweep-*.log")
        board.update()
        time.sleep(5)


# ---- the command -----------------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """1,2,4 → [1, 2, 4]"""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"must look like 1,2,4 and not like {text!r}")
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = Parser(prog="python -m course_lib.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=[], help="such as 1,2,4; none: only show what there is")
    parser.add_argument("--seeds", type=numbers, default=[0], help="such as 0,1,2 (default: 0)")
    parser.add_argument("--srun", action="store_true", help="start ranks by srun: inside a Slurm job")
    options, rest = parser.parse_known_args()
    config = Config.parse(rest, prog=parser.prog)
    if options.ranks:
        run(config, options.ranks, options.seeds, srun=options.srun)
    rows = summarise(collect(config.run))
    if not rows:
        raise UserError(f"{config.run} holds no finished runs; --ranks 1,2,4 makes some")
    print(show(rows))
    plots.speed_up(rows)
    plt.savefig(config.run / "scaling.png", dpi=120)
    print(f"done: {config.run / 'scaling.png'}")
    return 0


if __name__ == "__main__":
    run_main(main)
