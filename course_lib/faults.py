"""Faults on purpose, for the labs in which things break."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from course_lib.config import Config
from course_lib.launch import find_ranks
from course_lib.metrics import read_log


@contextmanager
def kill(rank: int, config: Config, *, step: int) -> Iterator[None]:
    """While the block trains as the config says: kill -9 this rank once, as soon as the log has reached this step."""
    began, over = time.time(), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            with suppress(FileNotFoundError):
                done = [
                    event for event in read_log(config.run) if event["time"] > began and event.get("step", 0) >= step
                ]
                process = find_ranks(f"--name={config.name}").get(rank) if done else None
                if process:
                    print(f"[kill -9] rank {rank}, process {process.pid}, after step {done[-1]['step']}", flush=True)
                    return os.kill(process.pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
