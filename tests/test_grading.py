"""nbgrader releases, grades and answers the whole set: full marks for solutions, none for stubs, some for a half-done one."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import nbformat
import pytest
from exercise_cells import code_cells, grade_id, open_notebook
from helpers import REACHED_BY, ROOT, wait_until

from course_lib.config import run_main
from lessons import grade, release
from lessons.build import exercise_sources

NAMES = [source.stem for source in exercise_sources()]


@pytest.fixture
def grading(tmp_path, monkeypatch) -> Path:
    """A class of its own."""
    monkeypatch.setenv("COURSE_GRADING", str(tmp_path))
    monkeypatch.setenv("COURSE_PLAIN", "1")
    monkeypatch.setenv("PATH", os.defpath)  # as in a shell that knows nothing of the venv
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


def fill_in_one_at_a_time(stub: nbformat.NotebookNode, solution: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The stub with all answers, each of which takes those before it back: a task that needs another one fails."""
    stubs = {grade_id(cell): cell.source for cell in code_cells(stub) if cell.metadata.nbgrader.solution}
    before = []
    for cell in code_cells(fill_in(stub, solution, 99)):
        if grade_id(cell) in stubs:
            cell.source = "\n\n".join([*before, cell.source])
            before.append(stubs[grade_id(cell)])
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
    """Every cell runs in a real kernel; of a stub's cells only the checks fail, each by its own task's function."""
    grade.release([name])
    released = nbformat.read(grading / "release" / name / f"{name}.ipynb", as_version=4)
    stub, solution = open_notebook("exercises", name), open_notebook("solutions", name)
    assert [(cell.source, cell.metadata) for cell in released.cells] == [(c.source, c.metadata) for c in stub.cells]
    submit("all", name, fill_in_one_at_a_time(released, solution), grading)
    score, best = autograde(name, "all", grading)
    assert score == best > 0
    submit("none", name, stub, grading)
    assert autograde(name, "none", grading) == (0, best)
    cells = code_cells(nbformat.read(grading / "autograded" / "none" / name / f"{name}.ipynb", as_version=4))
    tasks = {grade_id(cell).removeprefix("write-"): cell.source for cell in cells if cell.metadata.nbgrader.solution}
    for cell in cells:
        errors = [output.evalue for output in cell.outputs if output.output_type == "error"]
        assert len(errors) == bool(cell.metadata.nbgrader.grade)
        if errors:
            (function,) = re.fullmatch(r"(\w+) is still to be written", errors[0]).groups()
            assert f"def {function}(" in tasks[grade_id(cell).removeprefix("check-").split("-")[0]]


def test_a_half_done_one_has_marks_in_between(grading):
    name = "ex04_ddp"
    grade.release([name])
    half = fill_in(open_notebook("exercises", name), open_notebook("solutions", name), 1)
    half.cells.append(nbformat.v4.new_code_cell(f"{REACHED_BY}\nprint(reached_by)"))
    submit("half", name, half, grading)
    score, best = autograde(name, "half", grading)
    assert 0 < score < best
    graded = nbformat.read(grading / "autograded" / "half" / name / f"{name}.ipynb", as_version=4)
    assert graded.cells[-1].outputs[0].text == "ipc\n"  # not by a port, which another program could take


def test_what_never_ends_is_stopped_and_explained_and_the_rest_is_graded(grading):
    """A loop outside of a function, a loop in one, and a deadlock."""
    name = "ex04_ddp"
    grade.release([name])
    stub = fill_in(open_notebook("exercises", name), open_notebook("solutions", name), 99)
    cells = {grade_id(cell): cell for cell in code_cells(stub)}
    cells["write-rate"].source += "\nwhile True:\n    pass\n"
    cells["write-buckets"].source += "\ndef make_buckets(sizes, limit):\n    while True:\n        print('again')\n"
    cells["write-average"].source += "\ndef average(model):\n    dist.recv(torch.zeros(1))\n"
    submit("loop", name, stub, grading)
    score, best = autograde(name, "loop", grading)
    points = {name: cell.metadata.nbgrader.points for name, cell in cells.items() if name.startswith("check-")}
    assert (score, best) == (
        sum(points.values()) - points["check-buckets"] - points["check-average"],
        sum(points.values()),
    )
    path = grading / "autograded" / "loop" / name / f"{name}.ipynb"
    said = {grade_id(cell): json.dumps(cell.outputs) for cell in code_cells(nbformat.read(path, as_version=4))}
    assert "A loop without an end, outside of a function?" in said["write-rate"]  # its function was there before
    assert "stopped after 5 s: your code is in `make_buckets`, line " in said["check-buckets"]
    assert len(said["check-buckets"]) < 20_000  # of all that it printed
    assert "they wait for each other: a deadlock: rank 0 is in `average`, line " in said["check-average"]


def test_on_a_hub_the_exchange_carries_what_is_released_submitted_and_answered(grading):
    """The commands of TEACHING.md; a learner's are said in what `make release` packs."""
    name, learner, exchange = "ex00_start", grading / "course", grading / "exchange"
    exchange.mkdir()
    exchange.chmod(0o1777)
    release.pack(grading / "course.tar.gz")
    with tarfile.open(grading / "course.tar.gz") as archive:
        archive.extractall(grading, filter="data")
    hub = os.environ | {"COURSE_EXCHANGE": str(exchange), "JUPYTER_DATA_DIR": str(grading / "jupyter")}
    home = {name: value for name, value in hub.items() if name != "COURSE_GRADING"}

    def say(*words: str, folder: Path = ROOT, variables: dict = hub) -> str:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    say("nbgrader", "generate_assignment", name)
    say("nbgrader", "release_assignment", name)
    assert f"ddl {name}" in say("nbgrader", "list", folder=learner, variables=home)
    say("nbgrader", "submit", name, folder=learner, variables=home)
    say("nbgrader", "collect", name)
    assert re.search(rf"{name} +0 of \d", say("lessons.grade", name))
    say("nbgrader", "generate_feedback", name)
    say("nbgrader", "release_feedback", name)
    say("nbgrader", "fetch_feedback", name, folder=learner, variables=home)
    (page,) = (learner / "exercises" / name / "feedback").rglob("*.html")
    assert "is still to be written" in page.read_text()


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


def test_each_is_graded_in_a_copy_of_the_gradebook_as_it_was_before_the_first(grading, monkeypatch):
    """One at a time, and each in no hurry: when it ends, the marks of the one before it are in the gradebook."""
    name, students, others = "ex00_start", ["ada", "bob", "eve"], []
    grade.release([name])
    for student in students:
        submit(student, name, open_notebook("exercises", name), grading)

    def graded(database: str) -> set[str]:
        with grade.book(database) as book:
            return {one.student.id for one in book.assignment_submissions(name)}

    def autograde(command: list[str], **_) -> subprocess.CompletedProcess:
        words = dict(word.split("=", 1) for word in command if "=" in word)
        student, part = words["--student"], words["--db"].removeprefix("sqlite:///")
        others.append(graded(part))
        wait_until(lambda: graded(grading / "gradebook.db") == set(students[: students.index(student)]), every=0.1)
        with grade.book(part) as book:
            book.add_student(student)
            book.add_submission(name, student)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(grade.subprocess, "run", autograde)
    marks = grade.grade_all([name], jobs=1)
    assert [student for student, _ in marks] == students and others == [set(), set(), set()]
    assert graded(grading / "gradebook.db") == set(students)
    assert not list(grading.glob("parts*"))


def test_grading_without_submissions_or_with_a_wrong_name_says_so(grading, monkeypatch, capsys):
    for name, words in (("ex04_ddp", "no submissions of ex04_ddp in"), ("ex99", "solutions/ex99 is not there")):
        monkeypatch.setattr("sys.argv", ["grade", name])
        with pytest.raises(SystemExit) as ended:
            run_main(grade.main)
        assert ended.value.code == 2 and words in capsys.readouterr().err
