"""Run lessons from their first cell to their last, as a learner's Run All does; executed copies land under runs/lessons/.

python -m lessons.run                        # every lesson at its full size
python -m lessons.run --smoke 01_baseline    # one of them at the size that CI uses
python -m lessons.run --smoke --renew        # and take its numbers as the new baselines, on purpose

A lesson records its numbers with course_lib.lesson.numbers(); tests/baselines/ says what they were, and how far they may stray.
"""

import argparse
import fcntl
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import papermill
from tqdm import tqdm

from course_lib.config import UserError, run_main
from course_lib.kernel import FileKernel
from course_lib.lesson import MIME
from lessons.build import ROOT, build, sources

SMOKE = ROOT / "lessons" / "smoke.json"
BASELINES = ROOT / "tests" / "baselines"
TOLERANCE = (
    0.25  # for a number that has no tolerance of its own: other machines round otherwise, and weather is chaotic
)


def run(source: Path, *, smoke: bool, out: Path, parameters: dict | None = None) -> dict[str, float]:
    """Execute one lesson and return the numbers it recorded."""
    out.mkdir(parents=True, exist_ok=True)
    executed = out / f"{source.stem}.ipynb"
    executed.write_text(build(source))
    values = smoke_parameters(source.stem) if smoke else {}
    os.environ["COURSE_PLAIN"] = "1"  # nobody watches a bar
    notebook = papermill.execute_notebook(
        executed,
        executed,
        parameters=values | (parameters or {}),
        cwd=ROOT / "notebooks",
        kernel_name="python3",
        kernel_manager_class=FileKernel,
        progress_bar=False,
        log_output=False,
    )
    return collect(notebook)


def smoke_parameters(name: str) -> dict:
    """The small sizes that CI runs, and the small data that goes with them."""
    settings = json.loads(SMOKE.read_text())
    for words in settings["data"]:
        make_data(words)
    return settings[name]


@functools.cache
def make_data(words: str) -> None:
    """Once, however many lessons need it; who else runs lessons waits for it."""
    command = [sys.executable, "-m", "course_lib.data.make", *words.split()]
    (ROOT / "data").mkdir(exist_ok=True)
    with open(ROOT / "data" / ".smoke.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however that ends
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def collect(notebook) -> dict[str, float]:
    """All numbers that an executed notebook recorded."""
    numbers: dict[str, float] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            numbers |= output.get("data", {}).get(MIME, {})
    return numbers


def compare(numbers: dict[str, float], baseline: dict[str, dict]) -> list[str]:
    """What differs from the baseline by more than its tolerance, or is missing, or is new."""
    complaints = []
    for name in sorted(set(numbers) | set(baseline)):
        if name not in numbers:
            complaints.append(f"{name} was not recorded")
        elif name not in baseline:
            complaints.append(f"{name} has no baseline")
        else:
            value, tolerance = baseline[name]["value"], baseline[name]["tolerance"]
            if not abs(numbers[name] - value) <= tolerance * abs(value):
                complaints.append(f"{name} is {numbers[name]:.6g}, not {value:.6g} ± {tolerance:.0%}")
    return complaints


def renew(name: str, numbers: dict[str, float]) -> None:
    """Write a lesson's baselines anew; tolerances that somebody has set stay."""
    path = BASELINES / f"{name}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    after = {
        key: {"value": value, "tolerance": before.get(key, {}).get("tolerance", TOLERANCE)}
        for key, value in numbers.items()
    }
    path.write_text(json.dumps(after, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lessons.run", description=__doc__.splitlines()[0])
    parser.add_argument("lessons", nargs="*", help="such as 01_baseline; none: all of them")
    parser.add_argument("--smoke", action="store_true", help="the small sizes of lessons/smoke.json")
    parser.add_argument("--renew", action="store_true", help="write the numbers to tests/baselines/; needs --smoke")
    options = parser.parse_args()
    known = {source.stem: source for source in sources()}
    for name in options.lessons:
        if name not in known:
            raise UserError(f"{name} is no lesson; there are {', '.join(known)}")
    if options.renew and not options.smoke:
        raise UserError("--renew needs --smoke: baselines are for the size that CI runs")
    failed = []
    for name in (bar := tqdm(options.lessons or known, unit="lesson")):
        bar.set_description(name)
        try:
            numbers = run(known[name], smoke=options.smoke, out=ROOT / "runs" / "lessons")
        except papermill.PapermillExecutionError as error:
            failed.append(name)
            tqdm.write(f"{name} failed in cell {error.exec_count}: {error.ename}: {error.evalue}", file=sys.stderr)
            continue
        tqdm.write(f"{name}: {json.dumps(numbers)}", file=sys.stdout)
        if options.renew:
            renew(name, numbers)
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
