"""What several test files need: equality to the last bit, the threads of a prefetcher, and waiting for something."""

import threading
import time
from collections.abc import Callable, Mapping

import torch

torch.set_num_threads(1)  # as every rank does; the sums then always run in the same order


def assert_same(a, b, where: str = "") -> None:
    """Equal to the last bit, however nested: same keys, same types, same tensors."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, Mapping):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for number, pair in enumerate(zip(a, b)):
            assert_same(*pair, f"{where}[{number}]")
    else:
        assert a == b, where


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def wait_until(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    """Poll; what does not come true in good time is a failure, never a hang."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
