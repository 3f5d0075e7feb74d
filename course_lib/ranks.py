"""Ranks inside a notebook: one MPI world of ipyparallel engines, numbered by MPI rank.

    from course_lib import ranks

    team = ranks.start(2)          # a moment later, cells that begin with %%px run on all ranks
    team["x"]                      # the values of a variable, by rank
    team.stop()

    ranks.torchrun(2, Config(strategy="ddp"))   # a whole training run on two ranks, its output tagged by rank

A rank that dies or freezes is noticed and explained. Nothing outlives the kernel that started it.
"""

import argparse
import os
import re
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import ipyparallel
from IPython import get_ipython
from IPython.display import display
from tqdm.auto import tqdm

from course_lib.config import UserError
from course_lib.engines import local_settings, nodes_here, slurm_settings, step_settings
from course_lib.failures import LOST, RanksError
from course_lib.launch import find_ranks, torchrun
from course_lib.ports import claim_ports
from course_lib.progress import has_bar

__all__ = ["Ranks", "RanksError", "find_ranks", "start", "torchrun"]
_running: list["Ranks"] = []


def start(n: int = 2, *, slurm: str | None = None, timeout: float = 120) -> "Ranks":
    """Start n ranks, here (on all nodes of the job that a notebook runs in) or as a Slurm job with these sbatch options
    ("" or "--nodes=2"); ends those of before."""
    for team in list(_running):
        team.stop()
    return Ranks(n, slurm=slurm, timeout=timeout)


class Ranks:
    """n engines in one MPI world. `%%px` cells run on all of them."""

    def __init__(self, n: int = 2, *, slurm: str | None = None, timeout: float = 120):
        if n < 1:
            raise UserError(f"at least one rank is needed, not {n}")
        self.n, self.gone = n, ""
        self.claim = claim_ports()
        if slurm is not None:
            settings = slurm_settings(self.claim, slurm)
        elif (nodes := min(n, nodes_here())) > 1:
            settings = step_settings(self.claim, nodes)
        else:
            settings = local_settings(self.claim)
        self.cluster = ipyparallel.Cluster(n=n, config=settings, log_level=50)
        _running.append(self)
        try:
            self._start(timeout)
        except BaseException:
            self.stop()
            raise
        if shell := get_ipython():
            shell.register_magic_function(self._px, "line_cell", "px")

    def _start(self, timeout: float) -> None:
        until, what = time.monotonic() + timeout, f"starting {self.n} ranks"
        if not has_bar():
            print(what, flush=True)
        look = {"leave": False, "bar_format": "{desc} {bar} {elapsed}", "disable": not has_bar()}
        with tqdm(total=self.n + 1, desc=what, **look) as bar:
            self.cluster.start_cluster_sync()
            self.client = self.cluster.connect_client_sync()
            bar.update()
            while len(self.client.ids) < self.n:
                if not self._engines.running:
                    raise RanksError("the ranks ended while they started", self._said())
                if time.monotonic() > until:
                    raise RanksError(f"only {len(self.client.ids)} of {self.n} ranks have started in {timeout:g} s")
                time.sleep(0.05)
                bar.update(1 + len(self.client.ids) - bar.n)
            self.pids = self.client[:].apply_sync(os.getpid)
            sizes = self.client[:].apply_sync(_world_size)
            if sizes != [self.n] * self.n:
                raise RanksError(f"one world of {self.n} ranks was asked for, and the ranks see worlds of {sizes}")

    @property
    def _engines(self):
        return next(iter(self.cluster.engines.values()))

    def _said(self) -> str:
        """What the engines and their launcher have written so far."""
        path = Path(self._engines.output_file)
        return path.read_text(errors="replace") if path.exists() else ""

    def run(self, code: str, *, targets: list[int] | None = None, timeout: float = 0) -> None:
        """Run code on all ranks (or on some), show what each printed in the order of ranks, raise what the first raised."""
        self._require_all()
        chosen = list(range(self.n)) if targets is None else targets
        result = self.client[chosen].execute(code, silent=False, block=False)
        try:
            self._wait(result, timeout)
        except KeyboardInterrupt:
            with suppress(Exception):
                self.client.send_signal(signal.SIGINT, targets=chosen, block=True)
            result.wait(3)
            raise
        finally:
            if not self.gone:
                result.wait_for_output(2)
            for rank, output in zip(chosen, result.metadata):
                _show(rank, output)
        try:
            result.get(timeout=5)
        except ipyparallel.error.RemoteError as error:
            self._require_all()
            raise self._first_failure(result, error) from None

    def _require_all(self) -> None:
        """Without a rank that died or froze the others would wait for it: end them too, and say what happened."""
        if not self.gone and len(self.client.ids) < self.n:
            self.gone = self._cause_of_death()
            self.stop()
        if self.gone:
            raise RanksError(f"{self.gone}: start them again with ranks.start({self.n})")

    def _wait(self, result, timeout: float) -> None:
        """Until all ranks are done; says so when some have failed and others still work, perhaps waiting for them."""
        began, told = time.monotonic(), False
        while not result.wait(0.2):
            self._require_all()
            failed = [part for part in result.metadata if part["status"] == "error"]
            if failed and not told and not result.wait(2):
                told = True
                names = ", ".join(f"rank {part['engine_id']}" for part in failed)
                print(f"{names} failed; the others may be waiting for it until their time-out", file=sys.stderr)
            if timeout and time.monotonic() - began > timeout:
                busy = [part["engine_id"] for part in result.metadata if part["status"] is None]
                self.stop()
                self.gone = "the ranks were stopped"
                raise RanksError(f"rank {busy[0] if busy else '?'} has not finished in {timeout:g} s; all were stopped")

    def _first_failure(self, result, error: ipyparallel.error.RemoteError) -> RanksError:
        """What the first rank to fail has raised; the others often fail only because it did."""
        entries = getattr(error, "elist", [(error.ename, error.evalue, error.traceback, error.engine_info)])
        ended = {part["engine_id"]: part["completed"] for part in result.metadata}
        name, value, traceback, where = min(entries, key=lambda entry: ended[entry[3]["engine_id"]])
        others = [f"rank {e[3]['engine_id']}: {e[0]}" for e in entries if e[3] is not where]
        also = f" (then {', '.join(others)})" if others else ""
        if name == "RuntimeError" and LOST.search(str(value)):
            also += f"; the ranks have lost each other: start them again with ranks.start({self.n})"
        return RanksError(f"rank {where['engine_id']} raised {name}: {value}{also}", traceback or "")

    def _cause_of_death(self) -> str:
        """Which rank died first, and how: what its shell has said; nothing if it froze."""
        missing = min(set(range(self.n)) - set(self.client.ids))
        until, told = time.monotonic() + 5, None
        while not told and time.monotonic() < until:
            time.sleep(0.1)
            told = re.search(r"rank (\d+) ended: (\d+)", self._said())
        rank, how = (told[1], _ending(int(told[2]))) if told else (missing, "does not answer any more")
        return f"rank {rank} {how}, and the others were stopped"

    def __getitem__(self, name: str) -> list:
        """The values of a variable, by rank."""
        self._require_all()
        return self.client[:].pull(name, block=True)

    def __setitem__(self, name: str, value) -> None:
        """Give all ranks a variable."""
        self._require_all()
        self.client[:].push({name: value}, block=True)

    def _px(self, line: str, cell: str | None = None) -> None:
        """%%px: run this cell on all ranks; --targets 0,2 on some; --local here too; --timeout 30 not longer than that."""
        if cell is None:
            return self.run(line)
        parser = argparse.ArgumentParser(prog="%%px", exit_on_error=False, add_help=False)
        parser.add_argument("-t", "--targets", type=lambda text: [int(rank) for rank in text.split(",")])
        parser.add_argument("--local", action="store_true")
        parser.add_argument("--timeout", type=float, default=0)
        try:
            options, rest = parser.parse_known_args(shlex.split(line))
        except argparse.ArgumentError as error:
            raise UserError(f"%%px: {error}") from None
        if rest or not set(options.targets or []) <= set(range(self.n)):
            raise UserError(f"%%px knows --targets (ranks 0 to {self.n - 1}), --local and --timeout, not {line!r}")
        self.run(cell, targets=options.targets, timeout=options.timeout)
        if options.local:
            get_ipython().run_cell(cell).raise_error()
        return None

    def stop(self) -> None:
        """End all ranks and all that belongs to them."""
        if self in _running:
            _running.remove(self)
        self.gone = self.gone or "the ranks were stopped"
        with suppress(AttributeError):
            self.client.close()
        self.cluster.stop_cluster_sync()
        self.claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.stop()


def _ending(code: int) -> str:
    """A shell adds 128 to a signal's number."""
    return f"was killed by signal {code - 128}" if 128 < code < 193 else f"ended with exit code {code}"


def _world_size() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def _show(rank: int, output: dict) -> None:
    """What one rank printed and displayed, every line with its rank."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if lines := output[name].splitlines():
            print("\n".join(f"[rank {rank}] {line}" for line in lines), file=stream)
    results = [output["execute_result"]["data"]] if output["execute_result"] else []
    for data in [shown["data"] for shown in output["outputs"] if "data" in shown] + results:
        if set(data) == {"text/plain"}:
            print(f"[rank {rank}] {data['text/plain']}")
        else:
            print(f"[rank {rank}]", flush=True)
            display(data, raw=True)
