"""TensorBoard inside of the notebook, for as long as the kernel lives: board.show("../runs").

It listens on this machine alone, at a free port. The page reaches it through the Jupyter server (jupyter-server-proxy), which
has checked who you are; so it works on a laptop and behind a JupyterHub.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
from IPython.display import IFrame

from course_lib.config import UserError
from course_lib.launch import GUARD
from course_lib.processes import clean_environment, kill_tree

_running: list["Board"] = []


def show(folder: str | Path, *, height: int = 700, timeout: float = 120) -> "Board":
    """Start it for all runs below a folder; one that an earlier call has started ends."""
    if not any(Path(folder).rglob("events.out.tfevents.*")):
        raise UserError(f"{folder} holds no run that was logged for TensorBoard; train with course_lib.lit first")
    for board in list(_running):
        board.stop()
    return Board(Path(folder).resolve(), height=height, timeout=timeout)


class Board:
    """A TensorBoard that runs. As the last value of a cell it is shown."""

    def __init__(self, folder: Path, *, height: int, timeout: float):
        self.height, self.said = height, []
        flags = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", "0", "--reload_interval", "5"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        command = [*GUARD, sys.executable, "-m", "tensorboard.main", *flags]
        self.process = psutil.Popen(command, env=clean_environment() | {"PYTHONUNBUFFERED": "1"}, **pipes)
        _running.append(self)
        threading.Thread(target=self._listen, daemon=True).start()
        until = time.monotonic() + timeout
        while not (found := re.search(r" at http://[^:]+:(\d+)/", "".join(self.said))):
            if self.process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise RuntimeError(f"TensorBoard did not start: {''.join(self.said[-3:]).strip() or 'it said nothing'}")
            time.sleep(0.05)
        self.port = int(found[1])

    def _listen(self) -> None:
        """A pipe that nobody reads would fill up, and stop it."""
        for line in self.process.stderr:
            self.said.append(line)

    @property
    def address(self) -> str:
        """Where the browser finds it: below the address of the Jupyter server."""
        return f"{os.environ.get('JUPYTERHUB_SERVICE_PREFIX', '/')}proxy/{self.port}/"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        html = IFrame(self.address, width="100%", height=self.height)._repr_html_()
        return {"text/html": html, "text/plain": f"TensorBoard at {self.address}"}

    def ask(self, what: str, **query: str) -> object:
        """What its own page would be told: tags() and points() are made of it."""
        words = f"?{urllib.parse.urlencode(query)}" if query else ""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/data/plugin/{what}{words}", timeout=30) as answer:
            return json.load(answer)

    def tags(self, timeout: float = 60) -> dict[str, list[str]]:
        """{run: the names of its curves}; right after its start it is still reading."""
        until = time.monotonic() + timeout
        while not (found := self.ask("scalars/tags")) and time.monotonic() < until:
            time.sleep(0.2)
        return {run: sorted(tags) for run, tags in found.items()}

    def points(self, run: str, tag: str) -> list[tuple[int, float]]:
        """A curve: (step, value) by (step, value)."""
        return [(step, value) for _, step, value in self.ask("scalars/scalars", run=run, tag=tag)]

    def stop(self) -> None:
        kill_tree([self.process])
        if self in _running:
            _running.remove(self)
