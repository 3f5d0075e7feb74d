"""From torch's profiler to a handful of words: which kind of work a step's time went into. And how long messages take."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

KINDS = {  # the first word found in an operation's name decides
    "convolution, backward": ("convolution_backward", "ConvolutionBackward", "conv2d_backward"),
    "convolution, forward": ("conv",),
    "normalisation": ("group_norm", "batch_norm", "GroupNorm"),
    "activation": ("relu", "threshold"),
    "pooling and upsampling": ("pool", "upsample"),
    "optimizer": ("_foreach", "addcdiv", "addcmul", "lerp", "Optimizer", "sqrt"),
    "padding, copies and joins": ("copy", "cat", "pad", "clone", "contiguous", "slice", "fill", "zero"),
}


def kind_of(operation: str) -> str:
    """The kind of work that an operation's name stands for."""
    for kind, words in KINDS.items():
        if any(word in operation for word in words):
            return kind
    return "the rest"


def by_kind(profiler: profile) -> dict[str, float]:
    """Milliseconds of each kind of work: the time that operations spent themselves, not in those they called."""
    spent: dict[str, float] = {}
    for event in profiler.key_averages():
        kind = kind_of(event.key)
        spent[kind] = spent.get(kind, 0.0) + (event.self_device_time_total or event.self_cpu_time_total) / 1e3
    return spent


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's C++ part announces itself on standard error, whatever it is told."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def profile_steps(step: Callable[[], object], *, times: int = 3) -> dict[str, float]:
    """Run a step a few times under the profiler; milliseconds a step of each kind of work."""
    step()  # the first one also allocates memory: left out
    with _quiet(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(times):
            step()
    return {kind: spent / times for kind, spent in by_kind(profiler).items()}


class _Operations(TorchDispatchMode):
    """Counts what is called for while it is entered; views are free."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += not operation.is_view
        return operation(*args, **kwargs or {})


def count_work(step: Callable[[], object]) -> tuple[int, int]:
    """(operations that a step asks a device for, floating-point operations of its matrix products)."""
    with FlopCounterMode(display=False) as flops, _Operations() as operations:
        step()
    return operations.count, flops.get_total_flops()


def seconds_to_send(tensors: Sequence[torch.Tensor]) -> float:
    """How long an all-reduce of each of these takes, one after the other: the median of several rounds."""
    taken = []
    for _ in range(10):
        dist.barrier()
        began = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
