"""One process that believes to be rank 0 of 1,024: torch's fake process group sends nothing, and we count what it is given.

    simulate.count("fsdp", make_model, batch, ranks=1024)  →  Traffic: every collective of one training step, with its bytes

The model really runs forward and backward; only the messages are imagined, so the values are nonsense and the bytes are exact.
The closed formulas beside it are what the counts must equal. What is private in torch is used in this file alone.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.config import UserError
from course_lib.parallel.shard import blocks, make_mesh, shard
from course_lib.unet import UNet

NAMES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
NAMES |= {"send": "send"}  # to one other rank, as halos and pipelines do


@dataclass(frozen=True)
class Message:
    """A collective: its name, the bytes of the whole tensor, and how many ranks take part. Or a plain `send`."""

    name: str
    bytes: int
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that a rank must send at least: (n−1)/n of the tensor, and twice that for an all-reduce."""
        if self.name == "send":
            return self.bytes
        return (2 if self.name == "all-reduce" else 1) * (self.ranks - 1) / self.ranks * self.bytes


class Traffic(TorchDispatchMode):
    """While it is entered, notes every collective that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("c10d::").split(".")[0]
        if function.namespace == "c10d" and name in NAMES:
            tensors = [tensor for arg in args for tensor in (arg if isinstance(arg, list) else [arg])]
            size = max(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            group = next(group for group in map(_as_group, args) if group)
            self.messages.append(Message(NAMES[name], size, group.size()))
        return function(*args, **(kwargs or {}))

    @property
    def calls(self) -> Counter:
        return Counter(message.name for message in self.messages)

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a step."""
        return sum(message.sent for message in self.messages)


def _as_group(arg) -> dist.ProcessGroup | None:
    with contextlib.suppress(TypeError, RuntimeError):
        return dist.ProcessGroup.unbox(arg)
    return None


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """A process group of so many ranks of which only rank 0 exists. torch keeps it for its own tests, and may move it."""
    if dist.is_initialized():
        raise UserError("this process is a rank already: simulate in another one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def ddp(model: UNet, bucket_mb: float) -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)

    def send(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # its own waits for what never comes
        dist.all_reduce(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, send)
    return wrapped


def count(
    strategy: str, make: Callable[[], UNet], x: torch.Tensor, *, ranks: int, bucket_mb: float = 25.0, inside: int = 8
) -> Traffic:
    """The traffic of one step of "ddp", "fsdp" or "hsdp" (`inside` ranks to a sharding group) on so many ranks."""
    if strategy == "hsdp" and ranks % inside:
        raise UserError(f"{ranks} ranks can't be divided into groups of {inside}")
    wrap = {
        "ddp": lambda model: ddp(model, bucket_mb),
        "fsdp": lambda model: shard(model, make_mesh("cpu", ranks)),
        "hsdp": lambda model: shard(model, make_mesh("cpu", ranks // inside, inside)),
    }
    if strategy not in wrap:
        raise UserError(f"the simulation knows {', '.join(wrap)}, not {strategy!r}")
    with fake_world(ranks):
        model = wrap[strategy](make())
        for _ in range(2):  # after the first step DDP arranges its buckets anew
            with Traffic() as traffic:
                model(x).sum().backward()
            model.zero_grad()
        del model
    return traffic


# ---- what the counts must be -----------------------------------------------------------------------------------------------


def ddp_bytes(model: UNet, ranks: int) -> float:
    """2(n−1)/n·S: every gradient is reduced to one place and comes back from there, in equal pieces."""
    return 2 * (ranks - 1) / ranks * sum(parameter.nbytes for parameter in model.parameters())


def fsdp_bytes(model: UNet, ranks: int) -> float:
    """3(n−1)/n·S: weights are gathered for forward and again for backward, gradients scattered once.

    The weights of the root (here the head) stay after forward. And S is what FSDP2 really sends: it cuts the first
    dimension into n equal pieces, padding what does not divide.
    """
    inner = [padded(block, ranks) for block in blocks(model)]
    return (ranks - 1) / ranks * (3 * sum(inner) + 2 * padded(model.head, ranks))


def hsdp_bytes(model: UNet, ranks: int, inside: int = 8) -> float:
    """FSDP inside each group; then every rank averages its piece of the gradients with its fellows in the other groups."""
    groups = ranks // inside
    piece = sum(padded(block, inside) for block in [*blocks(model), model.head]) / inside
    return fsdp_bytes(model, inside) + 2 * (groups - 1) / groups * piece


def padded(module: nn.Module, ranks: int) -> int:
    """Bytes of a module's parameters when each one's first dimension is filled up to a multiple of the ranks."""
    return sum(p.nbytes // len(p) * math.ceil(len(p) / ranks) * ranks for p in module.parameters())
