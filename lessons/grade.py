"""Grade all submissions of assignments, several at a time: here, or one a core of a Slurm job (slurm/grade.sbatch).

python -m lessons.grade ex04_ddp                   # as many at a time as there are cores
python -m lessons.grade ex04_ddp lab1_break_it --jobs 4 --with "srun --ntasks=1 --exact"

Submissions lie in runs/grading/submitted/<student>/<assignment>/, where `nbgrader collect` puts them. Each is graded by nbgrader
itself, with a copy of the gradebook of its own, made before the first begins: one SQLite file on a network's disk does not stand
forty writers. This process alone then writes all marks into the gradebook, and `nbgrader generate_feedback` and `nbgrader export`
work as always.
"""

import argparse
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI
from sqlalchemy.exc import SAWarning, SQLAlchemyError
from tqdm import tqdm
from traitlets.config.loader import PyFileConfigLoader

from course_lib.config import UserError, run_main
from lessons.build import ROOT


def folder() -> Path:
    """Where the class's submissions and marks are; nbgrader_config.py says the same."""
    return Path(os.environ.get("COURSE_GRADING", ROOT / "runs" / "grading")).resolve()


def nbgrader() -> NbGraderAPI:
    """nbgrader in this process, told what nbgrader_config.py says."""
    return NbGraderAPI(config=PyFileConfigLoader("nbgrader_config.py", path=str(ROOT)).load_config())


def book(database: Path) -> Gradebook:
    return Gradebook(f"sqlite:///{database}", os.environ.get("COURSE_ID", "ddl"))


def release(assignments: Sequence[str]) -> None:
    """Make the learners' version of each, and note it in the gradebook."""
    for assignment in assignments:
        if not (ROOT / "solutions" / assignment).is_dir():
            raise UserError(f"solutions/{assignment} is not there; see solutions/ for the names, or run make notebooks")
        done = nbgrader().generate_assignment(assignment, force=True)
        if not done["success"]:
            sys.stderr.write(f"{done['log'] or ''}{done.get('error') or ''}\n")
            raise UserError(f"nbgrader can't release {assignment}; what it said is above")


def snapshot(target: Path) -> Path:
    """The gradebook as it is now, whole even while somebody writes in it."""
    with closing(sqlite3.connect(folder() / "gradebook.db")) as now, closing(sqlite3.connect(target)) as copy:
        now.backup(copy)
    return target


def grade(assignment: str, student: str, before: Path, launch: Sequence[str] = ()) -> Path:
    """Grade one submission in a copy of the gradebook as it was before; the copy."""
    part = before.with_name(f"{assignment}-{student}.db")
    shutil.copyfile(before, part)
    words = ["autograde", assignment, f"--student={student}", f"--db=sqlite:///{part}", "--force"]
    command = [*launch, sys.executable, "-m", "nbgrader", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{shlex.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return part


def take_over(part: Path, assignment: str, student: str) -> tuple[float, float]:
    """Copy one submission's marks and comments into the class's gradebook: (score, best possible score)."""
    with warnings.catch_warnings(), book(part) as source, book(folder() / "gradebook.db") as target:
        warnings.simplefilter("ignore", SAWarning)  # of nbgrader's own queries
        one = source.find_submission(assignment, student)
        target.update_or_create_student(student)
        target.update_or_create_submission(assignment, student, timestamp=one.timestamp)
        for notebook in one.notebooks:
            for mark in notebook.grades:
                ours = target.find_grade(mark.name, notebook.name, assignment, student)
                ours.auto_score, ours.needs_manual_grade = mark.auto_score, mark.needs_manual_grade
            for comment in notebook.comments:
                ours = target.find_comment(comment.name, notebook.name, assignment, student)
                ours.auto_comment = comment.auto_comment
        target.db.commit()
        return one.score, one.max_score


def submissions(assignment: str) -> list[str]:
    return sorted(path.parent.name for path in (folder() / "submitted").glob(f"*/{assignment}"))


def grade_all(assignments: Sequence[str], *, jobs: int, launch: Sequence[str] = ()) -> dict[tuple[str, str], tuple]:
    """{(student, assignment): (score, best possible)}; a submission that can't be graded is told and left out."""
    known = set()
    if (folder() / "gradebook.db").exists():
        with book(folder() / "gradebook.db") as gradebook:
            known = {assignment.name for assignment in gradebook.assignments}
    release([assignment for assignment in assignments if assignment not in known])
    todo = [(student, assignment) for assignment in assignments for student in submissions(assignment)]
    if not todo:
        raise UserError(f"no submissions of {', '.join(assignments)} in {folder() / 'submitted'}/<student>/")
    marks = {}
    own = tempfile.TemporaryDirectory(prefix="parts-", dir=folder(), ignore_cleanup_errors=True)
    with own as parts, ThreadPoolExecutor(jobs) as threads:
        before = snapshot(Path(parts) / "before.db")
        graded = [threads.submit(grade, assignment, student, before, launch) for student, assignment in todo]
        for (student, assignment), part in tqdm(list(zip(todo, graded)), unit="submission"):
            try:
                marks[student, assignment] = take_over(part.result(), assignment, student)
            except (UserError, OSError, SQLAlchemyError) as error:  # of one submission; the others have their marks
                tqdm.write(f"{student}, {assignment}: {error}", file=sys.stderr)
    return marks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lessons.grade", description=__doc__.splitlines()[0])
    parser.add_argument("assignments", nargs="+", help="such as ex04_ddp")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time (default: %(default)s)")
    parser.add_argument("--with", dest="launch", default="", help='what starts each, such as "srun --ntasks=1 --exact"')
    options = parser.parse_args()
    wanted = sum(len(submissions(assignment)) for assignment in options.assignments)
    marks = grade_all(options.assignments, jobs=options.jobs, launch=shlex.split(options.launch))
    for (student, assignment), (score, best) in marks.items():
        print(f"{student:20}  {assignment:20}  {score:g} of {best:g}")
    return 0 if len(marks) == wanted else 1


if __name__ == "__main__":
    run_main(main)
