"""Distributed data parallel by hand, three times: naive, bucketed, overlapped. All give the gradients of torch's own.

Every rank has a model of its own and a part of the batch. After backward all ranks average their gradients, so that all
make the same update and the models stay equal. The three differ only in when and in how many pieces gradients are sent.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib.config import Config
from course_lib.world import World


def broadcast(tensors: Iterator[torch.Tensor], world: World) -> None:
    """All ranks take rank 0's values."""
    if world.world_size > 1:
        for tensor in tensors:
            dist.broadcast(tensor.data, src=0)


def start_equal(model: nn.Module, world: World) -> list[nn.Parameter]:
    """Give all ranks the same weights; the parameters in the order in which backward will reach them: the last first."""
    broadcast(itertools.chain(model.parameters(), model.buffers()), world)
    return [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]


# ---- 1. naive: one all-reduce a parameter, after backward ------------------------------------------------------------------


def naive(model: nn.Module, world: World, config: Config = Config(), timeline=None):
    """Average the gradients one by one, when all of them are there."""
    parameters = start_equal(model, world)

    def sync() -> None:
        for parameter in parameters:
            if parameter.grad is None:  # unused on this rank, perhaps not on the others: all must take part
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= world.world_size
            all_reduce(parameter.grad, timeline).wait()

    return model, sync


# ---- 2. bucketed: one all-reduce for many parameters -----------------------------------------------------------------------


class Bucket:
    """The gradients of several parameters side by side in one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        self.flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self.views = [
            piece.view_as(p) for piece, p in zip(self.flat.split([p.numel() for p in parameters]), parameters)
        ]

    def fill(self, world_size: int) -> torch.Tensor:
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.div(parameter.grad, world_size, out=view)
        return self.flat

    def hand_back(self) -> None:
        """The gradient is now a view of the flat tensor: nothing is copied."""
        for parameter, view in zip(self.parameters, self.views):
            parameter.grad = view


def make_buckets(parameters: Sequence[nn.Parameter], megabytes: float) -> list[Bucket]:
    """Fill buckets in the given order; each holds at least one parameter, and one type of number."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        size += parameter.nbytes
        if not groups or size > megabytes * 2**20 or parameter.dtype != groups[-1][0].dtype:
            groups.append([])
            size = parameter.nbytes
        groups[-1].append(parameter)
    return [Bucket(group) for group in groups]


def bucketed(model: nn.Module, world: World, config: Config = Config(), timeline=None):
    """Average the gradients in a few large pieces: far fewer messages, each of which costs its latency."""
    buckets = make_buckets(start_equal(model, world), config.bucket_mb)
    return model, lambda: add_up(buckets, world.world_size, timeline)


def add_up(buckets: Sequence[Bucket], divide_by: int, timeline=None, group=None) -> None:
    """One bucket after the other: together in one tensor, over all ranks, back to the parameters."""
    for bucket in buckets:
        all_reduce(bucket.fill(divide_by), timeline, group).wait()
        bucket.hand_back()


# ---- 3. overlapped: a bucket leaves while backward still computes the next ones --------------------------------------------


class Overlapped(nn.Module):
    """A hook on every parameter counts: when a bucket's last gradient is there, its all-reduce starts in the background."""

    def __init__(self, model: nn.Module, world: World, *, megabytes: float = 25.0, timeline=None):
        super().__init__()
        self.module, self.world_size, self.timeline = model, world.world_size, timeline
        self.buckets = make_buckets(start_equal(model, world), megabytes)
        self.missing = [len(bucket.parameters) for bucket in self.buckets]  # gradients not there yet
        self.work: list[dist.Work] = []  # one all-reduce under way for each bucket that has left
        self.enabled = True
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self.count(number))

    def forward(self, *inputs):
        return self.module(*inputs)

    def count(self, number: int) -> None:
        """Called in backward when a gradient of this bucket is there."""
        if self.enabled:
            if not self.missing[number]:
                raise RuntimeError("a second backward before sync(): put all but the last one under no_sync()")
            self.missing[number] -= 1
            while len(self.work) < len(self.buckets) and self.missing[len(self.work)] == 0:
                self.leave()  # in the same order on every rank, or buckets would be mixed up

    def leave(self) -> None:
        bucket = self.buckets[len(self.work)]
        self.work.append(all_reduce(bucket.fill(self.world_size), self.timeline))

    def sync(self) -> None:
        """Wait for what is still under way. A bucket with a parameter that nobody used has not left yet."""
        while len(self.work) < len(self.buckets):
            self.leave()
        for work, bucket in zip(self.work, self.buckets):
            work.wait()
            bucket.hand_back()
        self.work, self.missing = [], [len(bucket.parameters) for bucket in self.buckets]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of several backward passes add up first, and travel once."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


def overlapped(model: nn.Module, world: World, config: Config = Config(), timeline=None):
    """Average the gradients in buckets, each as soon as it is full: communication hides behind backward."""
    wrapped = Overlapped(model, world, megabytes=config.bucket_mb, timeline=timeline)
    return wrapped, wrapped.sync


# ---- 4. torch's own --------------------------------------------------------------------------------------------------------


def options(config: Config) -> dict:
    """What DDP is told, by us or by Lightning."""
    return {
        "bucket_cap_mb": config.bucket_mb,
        "gradient_as_bucket_view": True,
        "forward_sync_buffers": False,  # the trainer shares them before it evaluates, where shards may be uneven
    }


def ddp(model: nn.Module, world: World, config: Config = Config(), timeline=None):
    """PyTorch's DistributedDataParallel: the third of the above, in C++."""
    devices = [world.device.index] if world.device.type == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=devices, **options(config))
    if timeline:  # a communication hook may do anything instead of the all-reduce: here it also notes the time
        wrapped.register_comm_hook(world.world_size, lambda world_size, bucket: _noted(bucket, world_size, timeline))
    return wrapped, lambda: None


def _noted(bucket: dist.GradBucket, world_size: int, timeline) -> torch.futures.Future:
    work = all_reduce(bucket.buffer().div_(world_size), timeline)
    return work.get_future().then(lambda future: future.value()[0])


def all_reduce(tensor: torch.Tensor, timeline=None, group=None) -> dist.Work:
    """Start to add up a tensor over all ranks (of a group); a timeline notes when that began and when it was done."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if timeline:
        timeline.follow(work.get_future(), "communicate")
    return work
