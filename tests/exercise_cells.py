"""An exercise's cells run in this process as a kernel would run them, and the wrong answers of tests/wrong/."""

import linecache
import re
from itertools import count
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import nbformat
from helpers import ROOT

FOLDER = Path(__file__).parent / "wrong"
_numbers = count()


class Wrong(NamedTuple):
    """A wrong answer to one task, and words of what the check must say about it."""

    exercise: str
    task: str
    words: str
    code: str


def wrong_answers(exercise: str) -> list[Wrong]:
    text = (FOLDER / f"{exercise}.py").read_text()
    parts = re.split(r"^# %% (\S+): (.+)\n", text, flags=re.M)[1:]
    return [Wrong(exercise, *parts[first : first + 3]) for first in range(0, len(parts), 3)]


def open_notebook(folder: str, exercise: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / folder / exercise / f"{exercise}.ipynb", as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def grade_id(cell: nbformat.NotebookNode) -> str:
    return cell.metadata.nbgrader.grade_id


def run_cell(code: str, names: dict) -> None:
    """Run a cell's code with a kernel's names; its lines can be quoted as those of a cell."""
    file = f"cell-{next(_numbers)}"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), names)
    plt.close("all")


def new_names() -> dict:
    return {"__name__": "__main__"}
