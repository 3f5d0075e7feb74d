"""nbgrader releases, grades and answers the whole set: full marks for solutions, none for stubs, some for a half-done one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from exercise_cells import code_cells, grade_id, open_notebook
from helpers import ROOT

from course_lib.config import run_main
from lessons import grade
from lessons.build import exercise_sources

NAMES = [source.stem for source in exercise_sources()]


@pytest.fixture
def grading(tmp_path, monkeypatch) -> Path:
    """A class of its own."""
    monkeypatch.setenv("COURSE_GRADING", str(tmp_path))
    monkeypatch.setenv("COURSE_PLAIN", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def submit(student: str, name: str, notebook: nbformat.NotebookNode, grading: Path) -> None:
    folder = grading / "submitted" / student / name
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / f"{name}.ipynb")


def fill_in(stub: nbformat.NotebookNode, solution: nbformat.NotebookNode, tasks: int) -> nbformat.NotebookNode:
    """The stub with the answers to the first tasks."""
    answers = {grade_id(cell): cell.source for cell in code_cells(solution) if cell.metadata.nbgrader.solution}
    for cell in code_cells(stub):
        if grade_id(cell) in list(answers)[:tasks]:
            cell.source = answers[grade_id(cell)]
    return stub


def autograde(name: str, student: str, grading: Path) -> tuple[float, float]:
    done = grade.nbgrader().autograde(name, student, force=True)
    assert done["success"], done.get("error") or done["log"]
    with grade.book(grading / "gradebook.db") as book:
        one = book.find_submission(name, student)
        return one.score, one.max_score


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(900)
def test_solutions_have_full_marks_and_stubs_fail_at_their_stubs(name, grading):
    """Every cell runs in a real kernel; of a stub's cells only the checks fail, each by what is still to be written."""
    grade.release([name])
    released = nbformat.read(grading / "release" / name / f"{name}.ipynb", as_version=4)
    stub, solution = open_notebook("exercises", name), open_notebook("solutions", name)
    assert [(cell.source, cell.metadata) for cell in released.cells] == [(c.source, c.metadata) for c in stub.cells]
    submit("all", name, fill_in(released, solution, 99), grading)
    score, best = autograde(name, "all", grading)
    assert score == best > 0
    if name.startswith("ex"):  # a lab's unwritten answer is refused before anything is run: test_labs.py
        submit("none", name, stub, grading)
        assert autograde(name, "none", grading) == (0, best)
        for cell in code_cells(nbformat.read(grading / "autograded" / "none" / name / f"{name}.ipynb", as_version=4)):
            errors = [output.evalue for output in cell.outputs if output.output_type == "error"]
            assert [("still to be written" in error) for error in errors] == [True] * bool(cell.metadata.nbgrader.grade)


def test_a_half_done_one_has_marks_in_between(grading):
    name = "ex04_ddp"
    grade.release([name])
    submit("half", name, fill_in(open_notebook("exercises", name), open_notebook("solutions", name), 1), grading)
    score, best = autograde(name, "half", grading)
    assert 0 < score < best


def test_a_loop_outside_of_functions_is_stopped_and_the_rest_is_graded(grading):
    name = "ex04_ddp"
    grade.release([name])
    stub = fill_in(open_notebook("exercises", name), open_notebook("solutions", name), 99)
    broken = next(cell for cell in code_cells(stub) if grade_id(cell) == "write-average")
    broken.source += "\nwhile True:\n    pass\n"
    submit("loop", name, stub, grading)
    score, best = autograde(name, "loop", grading)
    assert score == best  # the function was there before the loop
    graded = nbformat.read(grading / "autograded" / "loop" / name / f"{name}.ipynb", as_version=4)
    said = json.dumps([cell.outputs for cell in code_cells(graded)])
    assert "A loop without an end, outside of a function?" in said


def test_submissions_are_graded_side_by_side_and_answered(grading, capsys):
    """By the command that an instructor uses; a notebook that is none is told, and the others have their marks."""
    name = "ex00_start"
    solution = open_notebook("solutions", name)
    for student, tasks in (("ada", 99), ("bob", 0)):
        submit(student, name, fill_in(open_notebook("exercises", name), solution, tasks), grading)
    submit("eve", name, solution, grading)
    (grading / "submitted" / "eve" / name / f"{name}.ipynb").write_text("not a notebook")
    command = [sys.executable, "-m", "lessons.grade", name, "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "eve, ex00_start: " in done.stderr
    marks = {line.split()[0]: line.split()[2:] for line in done.stdout.splitlines()}
    best = marks["ada"][-1]
    assert marks == {"ada": [best, "of", best], "bob": ["0", "of", best]}
    with grade.book(grading / "gradebook.db") as book:
        assert {one.student.id: one.score for one in book.assignment_submissions(name)} == {
            "ada": float(best),
            "bob": 0.0,
        }
    shutil.rmtree(grading / "submitted" / "eve")
    done = grade.nbgrader().generate_feedback(name)
    assert done["success"], done
    assert "is still to be written" in (grading / "feedback" / "bob" / name / f"{name}.html").read_text()


def test_grading_without_submissions_or_with_a_wrong_name_says_so(grading, monkeypatch, capsys):
    for name, words in (("ex04_ddp", "no submissions of ex04_ddp in"), ("ex99", "solutions/ex99 is not there")):
        monkeypatch.setattr("sys.argv", ["grade", name])
        with pytest.raises(SystemExit) as ended:
            run_main(grade.main)
        assert ended.value.code == 2 and words in capsys.readouterr().err
