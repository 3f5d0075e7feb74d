"""What every lesson does: show the real source of a function, and end with the numbers that its run measured."""

import inspect
import math

from IPython.display import Code, display

MIME = "application/vnd.course-numbers+json"


def show(*things) -> None:
    """Show the source of functions and classes as it is in the library: never a copy."""
    for thing in things:
        display(Code(inspect.cleandoc("\n" + inspect.getsource(thing)), language="python"))


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
