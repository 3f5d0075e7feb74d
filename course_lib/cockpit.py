"""How a job looks: a line and a bar that move by themselves in Lab, plain lines under papermill and in a terminal."""

import html
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ipywidgets
from IPython.display import display

from course_lib.progress import has_bar
from course_lib.scheduler import Status

if TYPE_CHECKING:
    from course_lib.jobs import Job


def say(text: str) -> None:
    print(text, flush=True)


def show(job: "Job") -> None:
    """The job as it is now; in Lab it goes on by itself, while the notebook does something else."""
    if has_bar():
        threading.Thread(target=_Panel(job).keep_up, daemon=True).start()
    else:
        say(f"{job}: {job.status()}")


def follow(job: "Job") -> Status:
    """Wait for the job's end in the same way."""
    if has_bar():
        return _Panel(job).keep_up()
    told = ""
    for status in _watch(job):
        line = f"{job}: {status}"
        if status.finished or _gist(status) != told:  # a changed clock alone is no news
            told = _gist(status)
            say(line)
    return status


def _gist(status: Status) -> str:
    tenth = 10 * status.step // status.steps if status.steps else 0
    return f"{status.state} {status.reason} {tenth}"


def _watch(job: "Job"):
    """A status now and then, to the last one: each second at first, rarely for a long job; schedulers dislike questions."""
    began = time.monotonic()
    while True:
        status = job.status()
        yield status
        if status.finished:
            return
        time.sleep(min(15.0, 1 + (time.monotonic() - began) / 30))


class _Panel:
    """A line of text, a bar and a button."""

    def __init__(self, job: "Job"):
        self.job = job
        self.text = ipywidgets.HTML()
        self.bar = ipywidgets.FloatProgress(min=0, max=1, layout={"width": "200px"})
        self.button = ipywidgets.Button(description="cancel", layout={"width": "80px"})
        self.button.on_click(self._cancel)
        display(ipywidgets.HBox([self.bar, self.button, self.text]))

    def _cancel(self, _) -> None:
        self.button.disabled = True
        self.job.cancel()

    def keep_up(self) -> Status:
        for status in _watch(self.job):
            self.text.value = html.escape(f"{self.job}: {status}")
            self.bar.value = status.step / status.steps if status.steps else 0
            if status.finished:
                self.bar.bar_style = "success" if status.state == "COMPLETED" else "danger"
                self.button.layout.display = "none"
        return status


@dataclass(frozen=True)
class Table:
    """Rows under titles: HTML in a notebook, columns of text elsewhere."""

    titles: Sequence[str]
    rows: Sequence[Sequence]

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

        return f"<table>{line('th', self.titles)}{''.join(line('td', row) for row in self.rows)}</table>"

    def __repr__(self) -> str:
        lines = [[str(cell) for cell in row] for row in (self.titles, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
