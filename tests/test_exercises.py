"""Every lesson has an exercise, with hints and a picture, and wrong answers are told what is wrong."""

import re
from collections import Counter

import matplotlib
import pytest
from exercise_cells import code_cells, grade_id, new_names, open_notebook, run_cell, wrong_answers

from course_lib.checks import WrongAnswer
from course_lib.trial import TrialError, prepare
from lessons import build
from lessons.build import exercise_sources, sources

matplotlib.use("agg")
prepare("torch._dynamo", "lightning")  # what any of the exercises asks for
NAMES = [source.stem for source in exercise_sources()]
EXERCISES = [name for name in NAMES if name.startswith("ex")]


def test_every_lesson_has_an_exercise():
    assert sorted({name[2:4] for name in EXERCISES}) == [source.stem[:2] for source in sources()]


@pytest.mark.parametrize("name", EXERCISES)
def test_wrong_answers_are_told_what_is_wrong(name, capsys):
    """By what the learner has: the checks of exercises/, without hidden tests."""
    cells = code_cells(open_notebook("solutions", name))
    names = new_names()
    for cell in cells:
        if not cell.metadata.nbgrader.grade:  # that the solutions are right is known from test_grading.py
            run_cell(cell.source, names)
    visible = [cell for cell in code_cells(open_notebook("exercises", name)) if cell.metadata.nbgrader.grade]
    tasks = {grade_id(cell).removeprefix("write-"): cell for cell in cells if cell.metadata.nbgrader.solution}
    wrong = wrong_answers(name)
    assert len(tasks) >= 2  # or nothing could be half done
    counts = Counter(one.task for one in wrong)
    assert set(counts) == set(tasks) and min(counts.values()) >= 2, "each task has two wrong answers or more"
    for one in wrong:
        checks = [cell for cell in visible if re.fullmatch(rf"check-{one.task}(-.+)?", grade_id(cell))]
        run_cell(one.code, names)
        with pytest.raises((WrongAnswer, TrialError)) as caught:
            for cell in checks:
                run_cell(cell.source, names)
        assert one.words in str(caught.value), f"{one.task}: {caught.value}"
        run_cell(tasks[one.task].source, names)


@pytest.mark.parametrize("name", EXERCISES)
def test_each_task_has_three_hints_and_a_picture(name):
    """Between the cell to write in and its check."""
    tasks: list[list[str]] = []
    waiting = False
    for cell in open_notebook("exercises", name).cells:
        marks = cell.metadata.get("nbgrader", {})
        if marks.get("solution"):
            tasks.append([])
        waiting = marks.get("solution") or waiting and not marks.get("grade")
        if waiting:
            tasks[-1].append(cell.source)
    for cells in tasks:
        text = "\n".join(cells)
        assert re.findall(r"<summary>Hint (\d)</summary>", text) == ["1", "2", "3"], text
        assert "plots." in text, text


@pytest.mark.parametrize("name", NAMES)
def test_long_checks_are_folded_and_nothing_else_is(name):
    """Whether that survives nbgrader's release is known from test_grading.py."""
    notebook = open_notebook("exercises", name)
    folded = [grade_id(cell) for cell in code_cells(notebook) if cell.metadata.get("jupyter", {}).get("source_hidden")]
    checks = [grade_id(cell) for cell in code_cells(notebook) if cell.metadata.nbgrader.grade]
    assert folded == (checks if name in EXERCISES else [])
    assert ("It is folded" in notebook.cells[0].source) == bool(folded)


@pytest.mark.parametrize("name", EXERCISES)
def test_each_check_has_hidden_tests_that_are_others_than_the_visible_ones(name):
    for cell in code_cells(open_notebook("solutions", name)):
        if cell.metadata.nbgrader.grade:
            visible, hidden = re.fullmatch(
                r"(.+)### BEGIN HIDDEN TESTS\n(.+)### END HIDDEN TESTS", cell.source.strip(), re.S
            ).groups()
            assert hidden.strip() and not set(hidden.splitlines()) & set(visible.splitlines()), hidden


TASK = """# %% [markdown]
# # Title

# %% solution="one"
def one():
    ### BEGIN SOLUTION
    return 1
    ### END SOLUTION


# %% check="one" points=1
assert one() == 1
### BEGIN HIDDEN TESTS
assert one() == 1.0
### END HIDDEN TESTS
"""


def test_what_is_built_and_that_work_in_it_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    source = tmp_path / "lessons" / "exercises" / "ex00_x.py"
    source.parent.mkdir(parents=True)
    source.write_text(TASK)
    monkeypatch.setattr("sys.argv", ["build"])
    assert build.main() == 0
    stub, solution = (tmp_path / folder / "ex00_x" / "ex00_x.ipynb" for folder in ("exercises", "solutions"))
    assert "return 1" in solution.read_text() and "HIDDEN" in solution.read_text()
    assert "return 1" not in stub.read_text() and "HIDDEN" not in stub.read_text() and "1.0" not in stub.read_text()
    assert '"points": 1' in stub.read_text() and "raise NotImplementedError()" in stub.read_text()
    stub.write_text(stub.read_text().replace("raise NotImplementedError()", "return 2"))
    source.write_text(TASK.replace("Title", "Other"))
    capsys.readouterr()
    assert build.main() == 0
    assert "kept exercises/ex00_x/ex00_x.ipynb, which you have worked in" in capsys.readouterr().out
    assert "return 2" in stub.read_text() and "Other" in solution.read_text()
    monkeypatch.setattr("sys.argv", ["build", "--check"])
    assert build.main() == 1
    assert "exercises/ex00_x/ex00_x.ipynb differs from its source" in capsys.readouterr().err
