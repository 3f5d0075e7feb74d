"""What every lesson does: show the real source of a function, and end with the numbers that its run measured."""

import difflib
import inspect
import json
import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.display import Code, display

from course_lib import processes

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "reference"
MIME = "application/vnd.course-numbers+json"


def show(*things) -> None:
    """Show the source of functions and classes as it is in the library: never a copy."""
    for thing in things:
        display(Code(inspect.cleandoc("\n" + inspect.getsource(thing)), language="python"))


def listing(path: str | Path) -> None:
    """Show a file of the repository, with its colours."""
    display(Code(filename=str(ROOT / path)))


def changes(old: str | Path, new: str | Path) -> int:
    """Show how to come from one file to another; how many lines are new or different."""
    lines = [(ROOT / path).read_text().splitlines() for path in (old, new)]
    found = [line for line in difflib.unified_diff(*lines, n=0, lineterm="") if line[0] != "@"][2:]
    display(Code("\n".join(found), language="diff"))
    return sum(line[0] == "+" for line in found)


def recall(name: str, ask: Callable, *, live: bool | None, record: str) -> Any:
    """What `ask` finds; live=False: what it found when it was recorded in reference/. COURSE_RECORD=1 renews that."""
    file = REFERENCE / f"{record}.json"
    if live is False:
        known = json.loads(file.read_text())
        print(f"not run here, but recorded: {known['where']}\n")
        return known["found"][name]
    found = ask()
    if live and os.environ.get("COURSE_RECORD"):
        known = json.loads(file.read_text())
        known["found"][name] = found
        file.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n")
    return found


def shell(
    command: str, *, live: bool | None = None, name: str = "", record: str = "slurm", timeout: float = 120
) -> None:
    """Run a command line in the repository's folder and show what it prints; live=False: what it printed when recorded.

    A command that is not the same every time is recorded under a name.
    """

    def ask() -> str:
        code, printed = processes.run(["bash", "-c", f"set -e; cd {shlex.quote(str(ROOT))}; {command}"], timeout)
        if code != 0:
            raise RuntimeError(f"{command}: {processes.failure(code, printed, timeout)}")
        return printed.replace(f"{ROOT}/", "")

    print(recall(name or command, ask, live=live, record=record), end="")


def numbers(**values: float) -> None:
    """A table of a run's results (never times), which also records them for the regression tests."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    shown = {
        name.replace("_", " "): f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"
        for name, value in values.items()
    }
    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in shown.items())
    plain = "\n".join(f"{name}: {value}" for name, value in shown.items())
    data = {"text/html": f"<table>{rows}</table>", "text/plain": plain}
    display(data | {MIME: {name: float(value) for name, value in values.items()}}, raw=True)
