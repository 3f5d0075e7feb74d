"""Build notebooks/, exercises/ and solutions/ from lessons/: text is the source, notebooks carry no outputs and the same
cell ids every time.

python -m lessons.build           # write what has changed, but keep a notebook that somebody has worked in
python -m lessons.build --force   # write what has changed, whatever is in the way: for authors
python -m lessons.build --check   # exit 1, naming the files, if a notebook differs from its source
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import jupytext
import nbformat

from lessons.exercise import mark, release

ROOT = Path(__file__).parent.parent
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def sources() -> list[Path]:
    """The lessons in order: 00_start.py, 01_baseline.py, …"""
    return sorted((ROOT / "lessons").glob("[0-9][0-9]_*.py"))


def exercise_sources() -> list[Path]:
    """The exercises in order: ex00_start.py, …; a learner's archive has none, for they hold the solutions."""
    return sorted((ROOT / "lessons" / "exercises").glob("*.py"))


def read(source: Path) -> nbformat.NotebookNode:
    """A source as a notebook without ids."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def write(notebook: nbformat.NotebookNode) -> str:
    """The text of a notebook, with cell ids from the content: an edit changes one cell's, not those of all that follow."""
    seen: set[str] = set()
    for cell in notebook.cells:
        text = cell.source
        while (name := hashlib.sha256(text.encode()).hexdigest()[:12]) in seen:
            text += "\n"
        seen.add(name)
        cell.id = name
    notebook.metadata["course"] = {"sha256": digest(notebook)}
    nbformat.validate(notebook)
    return nbformat.writes(notebook, indent=1) + "\n"


def build(source: Path) -> str:
    """One lesson as the text of its notebook."""
    return write(read(source))


def build_solution(source: Path) -> str:
    """One exercise as nbgrader's source: solutions, marks and hidden tests are in it."""
    return write(mark(read(source)))


def build_exercise(source: Path) -> str:
    """One exercise as learners get it: as `nbgrader generate_assignment` would make it."""
    return write(release(mark(read(source))))


def digest(notebook: dict) -> str:
    """A hash of all that a notebook holds but this hash itself."""
    metadata = {key: value for key, value in notebook["metadata"].items() if key != "course"}
    content = json.dumps([notebook["cells"], metadata], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def worked_in(path: Path) -> bool:
    """Whether a notebook is no longer as it was built: run, edited or not even a notebook."""
    try:
        notebook = json.loads(path.read_text())
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
        return notebook["metadata"]["course"]["sha256"] != digest(notebook)
    except (ValueError, KeyError, TypeError):
        return True


def wanted_files() -> dict[Path, str]:
    """All notebooks as they should be. nbgrader wants a folder an assignment, named as the notebook."""
    wanted = {ROOT / "notebooks" / f"{source.stem}.ipynb": build(source) for source in sources()}
    for source in exercise_sources():
        place = f"{source.stem}/{source.stem}.ipynb"
        wanted |= {
            ROOT / "exercises" / place: build_exercise(source),
            ROOT / "solutions" / place: build_solution(source),
        }
    return wanted


def found_files() -> set[Path]:
    found = set((ROOT / "notebooks").glob("*.ipynb"))
    if exercise_sources():  # without their sources nobody can tell an orphan
        found |= {path for folder in ("exercises", "solutions") for path in (ROOT / folder).glob("*/*.ipynb")}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lessons.build", description="Build notebooks from lessons/.")
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.add_argument("--force", action="store_true", help="also replace notebooks that somebody has worked in")
    options = parser.parse_args()
    wanted = wanted_files()
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    orphans = sorted(path for path in found_files() - set(wanted) if path.parent.name != ".ipynb_checkpoints")
    if options.check:
        for path in changed + orphans:
            print(f"{path.relative_to(ROOT)} differs from its source; run: make notebooks", file=sys.stderr)
        return 1 if changed + orphans else 0
    for path in changed + orphans:
        if path.exists() and worked_in(path) and not options.force:
            print(f"kept {path.relative_to(ROOT)}, which you have worked in; rename it to get the newest text")
        elif path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
            print(f"built {path.relative_to(ROOT)}")
        else:
            path.unlink()
            print(f"removed {path.relative_to(ROOT)}, which has no source")
    return 0


if __name__ == "__main__":
    sys.exit(main())
