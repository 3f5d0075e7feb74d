"""One rank of a lab: something is done around a program, the program is run, and what it records is kept, however it ends."""

import faulthandler
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course_lib.faults import ALL
from course_lib.hangs import save_flight_record


def _slow(module: Any, name: str, seconds: float) -> None:
    """Let every call of a function begin with a nap."""
    fast: Callable = getattr(module, name)

    def slow(*arguments, **options):
        time.sleep(seconds)
        return fast(*arguments, **options)

    setattr(module, name, slow)


def _kill_in_step(number: int) -> None:
    """kill -9 this process when it is about to make this step."""
    steps = iter(range(number))

    def before(*_) -> None:
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(before)


def _leave_little_memory(megabytes: int) -> None:
    """From the first sample on, let this process have that much more than it has then. Only Linux counts it."""
    load = numpy.load

    def limit_and_load(*arguments, **options):
        numpy.load = load
        limit = psutil.Process().memory_info().data + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        return load(*arguments, **options)

    if sys.platform == "linux":
        numpy.load = limit_and_load


AROUND: dict[str, Callable[[], None]] = {
    "kill": partial(_kill_in_step, 4),
    "slow compute": partial(_slow, torch.nn.functional, "conv2d", 0.12),
    "slow reading": partial(_slow, numpy, "load", 0.04),
    "slow save": partial(_slow, torch, "save", 0.5),
    # A batch of 4 needs about 36 of these, one of 12 more than 60; with 48 its failure has another place, and other words.
    "little memory": partial(_leave_little_memory, 43),
}


def run_program(folder: Path, kind: str, victim: int | str, port: int, patience: float, rank: int) -> None:
    """In a rank: record the collectives, set the fault, run program.py; keep what it records, however it ends.

    When it has printed nothing for so long, its stacks are written as those of a rank that hangs.
    """
    os.environ |= {"TORCH_FR_BUFFER_SIZE": "1000", "MASTER_PORT": str(port)}
    os.chdir(folder)
    sys.argv = ["program.py", "data", "."]
    if kind and victim in (ALL, rank):
        AROUND[kind]()
    names = {"__name__": "__main__"}
    new = folder / f"new.{rank}"
    new.mkdir()

    def keep() -> None:
        with suppress(Exception):
            save_flight_record(new, rank)
        with suppress(Exception):
            names["timeline"].save(new / f"timeline.{rank}.json")
        for path in new.iterdir():
            path.replace(folder / path.name)  # whole, or not at all

    def keep_up() -> None:
        printed = 0
        with open(folder / f"stacks.{rank}", "a") as stacks:
            while not over.wait(0.1):
                keep()
                if (now := os.fstat(1).st_size) > printed:
                    printed = now
                    faulthandler.dump_traceback_later(patience, file=stacks)

    over = threading.Event()
    thread = threading.Thread(target=keep_up, daemon=True)  # it may hang, or end without a last word
    thread.start()
    try:
        exec(compile(Path("program.py").read_text(), "program.py", "exec"), names)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        over.set()
        thread.join()  # it would have the clock start again
        faulthandler.cancel_dump_traceback_later()
        keep()
