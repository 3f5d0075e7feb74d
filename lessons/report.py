"""What each lesson, exercise and lab takes on this machine: time, memory, processes, and what it needs. For who gives the course.

python -m lessons.report                        # all, lessons at their full size: plan half an hour or more
python -m lessons.report --smoke 04_ddp ex04_ddp    # some of them, lessons at the size that CI uses

Each is run from its first cell to its last, exercises with their solutions. The page is runs/report/index.html; report.json
beside it has the same numbers. Those that were measured before stay on the page until they are measured again.
"""

import argparse
import html
import json
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
from tqdm import tqdm

from course_lib.config import UserError, run_main
from lessons.build import ROOT, exercise_sources, sources

FOLDER = ROOT / "runs" / "report"
NEEDS = {  # what stands in the code: what that notebook would like to have
    r"find_cluster": "Slurm, or shows what was recorded",
    r"import horovod|hvd\.py": "Horovod, or shows what was recorded",
    r"data/minilm": "MiniLM from the package registry, or shows what was recorded",
    r"ranks\.start|on_mpi|mpiexec|mpirun": "MPI (make setup brings one)",
    r"(import|from) lightning|\b(lit|fabric)\b": "Lightning (make setup brings it)",
    r'Case\("3d"': "Linux for one case (on a Mac it is described)",
}


def measure(command: list[str]) -> dict:
    """Run a command to its end and watch all its processes: seconds, peak memory, and how many there were at once."""
    began, memory, most = time.monotonic(), 0.0, 0
    with open(FOLDER / "last.log", "w") as log:
        process = psutil.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            now, family = 0.0, [process, *process.children(recursive=True)]
            for each in family:
                with suppress(psutil.Error):
                    now += getattr(each.memory_full_info(), "pss", each.memory_info().rss)
            memory, most = max(memory, now), max(most, len(family))
            time.sleep(0.2)
    seconds = time.monotonic() - began
    return {"seconds": seconds, "memory_mb": memory / 2**20, "processes": most, "failed": process.returncode != 0}


def command_for(source: Path, smoke: bool) -> list[str]:
    if source.parent.name == "exercises":
        notebook = ROOT / "solutions" / source.stem / f"{source.stem}.ipynb"
        return [sys.executable, "-m", "papermill", "--no-progress-bar", str(notebook), str(FOLDER / "last.ipynb")]
    return [sys.executable, "-m", "lessons.run", *(["--smoke"] if smoke else []), source.stem]


def needs(source: Path) -> list[str]:
    """What its code asks for, and the programs in its code; its prose may speak of anything."""
    code = "\n".join(line for line in source.read_text().splitlines() if not line.startswith("#"))
    folders = sorted(set(re.findall(r"\.\./data/(\w+)", code)))
    return [f"data/{folder}" for folder in folders] + [what for word, what in NEEDS.items() if re.search(word, code)]


def page(rows: dict[str, dict]) -> str:
    """The report as one page."""
    memory = psutil.virtual_memory().total / 2**30
    where = f"{platform.node()}: {os.cpu_count()} cores, {memory:.0f} GB, Python {platform.python_version()}"
    lines = []
    for name, row in sorted(rows.items()):
        cells = [
            name,
            "failed" if row["failed"] else f"{row['seconds'] / 60:.1f} min",
            f"{row['memory_mb']:,.0f} MB",
            row["processes"],
            row["size"],
            "; ".join(row["needs"]) or "nothing else",
            row["when"],
        ]
        lines.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    titles = ("", "run time", "memory", "processes at once", "size", "needs", "measured")
    head = "".join(f"<th>{title}</th>" for title in titles)
    total = sum(row["seconds"] for row in rows.values()) / 60
    return (
        "<!doctype html><meta charset=utf-8><title>Course report</title>"
        "<style>body{font:16px sans-serif;margin:2em;max-width:70em}td,th{text-align:left;padding:.2em 1em .2em 0;"
        "vertical-align:top}tr:nth-child(even){background:#f4f4f4}</style>"
        f"<h1>What the course takes here</h1><p>{html.escape(where)}. {len(rows)} notebooks, {total:.0f} minutes in all.</p>"
        "<p>Run time is that of the machine alone: a learner reads, thinks and types. Memory is the most that all processes of a "
        "notebook had at once, shared pages counted once. Processes of Slurm's jobs are not counted, on whatever node.</p>"
        f"<table><tr>{head}</tr>{''.join(lines)}</table>\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lessons.report", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="such as 04_ddp or ex04_ddp; none: all of them")
    parser.add_argument("--smoke", action="store_true", help="lessons at the size that CI uses")
    options = parser.parse_args()
    known = {source.stem: source for source in (*sources(), *exercise_sources())}
    for name in options.names:
        if name not in known:
            raise UserError(f"{name} is no lesson and no exercise; there are {', '.join(known)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    saved = FOLDER / "report.json"
    rows = json.loads(saved.read_text()) if saved.exists() else {}
    failed = False
    for name in (bar := tqdm(options.names or known, unit="notebook")):
        bar.set_description(name)
        row = measure(command_for(known[name], options.smoke))
        size = "its own" if known[name].parent.name == "exercises" else "small" if options.smoke else "full"
        when = datetime.now().strftime("%Y-%m-%d %H:%M")
        rows[name] = row | {"size": size, "needs": needs(known[name]), "when": when}
        if row["failed"]:
            failed = True
            (FOLDER / "last.log").replace(FOLDER / f"{name}.log")
            tqdm.write(f"{name} failed; see runs/report/{name}.log", file=sys.stderr)
        saved.write_text(json.dumps(rows, indent=2) + "\n")  # after each: an interrupted report is a shorter one
        (FOLDER / "index.html").write_text(page(rows))
    print(f"wrote {os.path.relpath(FOLDER / 'index.html')}")
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
