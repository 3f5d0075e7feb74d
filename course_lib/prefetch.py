"""Load the next batches and move them to the device while the current one is computed.

    for x, y in Prefetcher(loader, device):
        ...

A thread runs the whole loader, so reading and decoding overlap with compute too, not only the copy. On a GPU it pins each
batch and copies it on a stream of its own; on a CPU the same thread and the same queue do without the copy.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch


def apply_to_tensors(batch, function: Callable[[torch.Tensor], torch.Tensor]):
    """Apply a function to every tensor of a batch made of tensors, tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: apply_to_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(apply_to_tensors(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(apply_to_tensors(value, function) for value in batch)
    return batch


class _Failure:
    """An exception on its way from the loading thread to the loop."""

    def __init__(self, error: BaseException):
        self.error = error


_END = object()


class Prefetcher:
    """The batches of `loader`, in the same order, loaded and moved up to `depth` ahead by a background thread."""

    def __init__(self, loader: Iterable, device: torch.device | str = "cpu", depth: int = 2):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.loader, self.device, self.depth = loader, torch.device(device), depth

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        batches = queue.Queue(self.depth)
        stop = threading.Event()
        arguments = (self.loader, self.device, batches, stop)
        thread = threading.Thread(target=_produce, args=arguments, name="prefetch", daemon=True)
        thread.start()
        try:
            while (batch := batches.get()) is not _END:
                if isinstance(batch, _Failure):
                    raise batch.error
                yield _hand_over(batch, self.device)
        finally:  # the loop ended, broke off or raised: the thread ends in each case
            stop.set()
            while thread.is_alive():  # it may be waiting for room in the queue
                _drain(batches)
                thread.join(timeout=0.01)


def _drain(batches: queue.Queue) -> None:
    try:
        while True:
            batches.get_nowait()
    except queue.Empty:
        pass


def _produce(loader: Iterable, device: torch.device, batches: queue.Queue, stop: threading.Event) -> None:
    """Runs in the thread: load, move, queue; then the end or the exception, in the place where it happened."""
    try:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for batch in loader:
            if stop.is_set():
                return
            batches.put(_move(batch, device, stream))
    except BaseException as error:
        batches.put(_Failure(error))
    else:
        batches.put(_END)


def _move(batch, device: torch.device, stream):
    if stream is None:
        return batch if device.type == "cpu" else apply_to_tensors(batch, lambda tensor: tensor.to(device))
    with torch.cuda.stream(stream):
        moved = apply_to_tensors(batch, lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
        return moved, stream.record_event()


def _hand_over(batch, device: torch.device):
    """On a GPU: the compute stream waits for the copy, and the allocator learns that it uses the memory now."""
    if device.type != "cuda":
        return batch
    batch, copied = batch
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    apply_to_tensors(batch, lambda tensor: tensor.record_stream(current))
    return batch
