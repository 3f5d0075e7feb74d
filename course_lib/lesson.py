"""What every lesson does: show the real source of a function, and end with the numbers that its run measured."""

import inspect
import json
import math
import os
import shlex
from pathlib import Path

from IPython.display import Code, display

from course_lib import processes

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "reference" / "slurm.json"
MIME = "application/vnd.course-numbers+json"


def show(*things) -> None:
    """Show the source of functions and classes as it is in the library: never a copy."""
    for thing in things:
        display(Code(inspect.cleandoc("\n" + inspect.getsource(thing)), language="python"))


def shell(command: str, *, live: bool | None = None, name: str = "") -> None:
    """Run a command line in the repository's folder and show what it prints; live=False: what it printed when recorded.

    A command that is not the same every time is recorded under a name. COURSE_RECORD=1 renews what live=True prints.
    """
    if live is not False:
        code, printed = processes.run(["bash", "-c", f"set -e; cd {shlex.quote(str(ROOT))}; {command}"], timeout=120)
        if code != 0:
            raise RuntimeError(f"{command}: {processes.failure(code, printed, 120)}")
        if live and os.environ.get("COURSE_RECORD"):
            _record(name or command, printed.replace(f"{ROOT}/", ""))
        print(printed, end="")
    else:
        known = json.loads(RECORDED.read_text())
        print(f"not run here, but recorded: {known['where']}\n\n{known['printed'][name or command]}", end="")


def _record(command: str, printed: str) -> None:
    known = json.loads(RECORDED.read_text())
    known["printed"][command] = printed
    RECORDED.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n")


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
