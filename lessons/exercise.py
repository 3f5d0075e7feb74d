"""From an exercise's text to nbgrader's notebooks. A cell's header says what it is:

# %% solution="average"               the learner writes what stands between ### BEGIN SOLUTION and ### END SOLUTION
# %% check="average" points=2         graded; what stands between ### BEGIN HIDDEN TESTS and ### END HIDDEN TESTS is hidden
# %%                                  given: read-only, so that nobody deletes an import by mistake

Text is text. Several checks may ask for one solution: check="average", check="average-again". A check of more than a few lines
is folded: what it knows of the answer is not in the way of who wants to find it, and one click away for who wants to read it.
"""

import nbformat
from nbgrader.preprocessors import ClearHiddenTests, ClearSolutions, ComputeChecksums, LockCells

SCHEMA = 3  # of nbgrader's metadata
FOLDED = 5  # lines or more


def mark(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Give every code cell nbgrader's metadata."""
    given = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        answer, check = cell.metadata.pop("solution", ""), cell.metadata.pop("check", "")
        marks = {"solution": bool(answer), "grade": bool(check), "locked": not answer, "task": False}
        if check:
            marks |= {"grade_id": f"check-{check}", "points": cell.metadata.pop("points")}
            if cell.source.count("\n") + 1 >= FOLDED:
                cell.metadata["jupyter"] = nbformat.from_dict({"source_hidden": True})
        elif answer:
            marks["grade_id"] = f"write-{answer}"
        else:
            marks["grade_id"], given = f"given-{given}", given + 1
        cell.metadata["nbgrader"] = nbformat.from_dict(marks | {"schema_version": SCHEMA})
    return notebook


def release(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without solutions and hidden tests, by nbgrader's own steps in nbgrader's own order."""
    for step in (LockCells, ClearSolutions, ComputeChecksums, ClearHiddenTests, ComputeChecksums):
        notebook, _ = step().preprocess(notebook, {})
    return notebook
