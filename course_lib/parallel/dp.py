"""DataParallel: one process, a thread a device; scatter, replicate, apply, gather, in every single step.

On GPUs this is torch's nn.DataParallel. That one refuses CPUs, so here are its four steps on threads, with the same result.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


def scatter(x: torch.Tensor, devices: int) -> list[torch.Tensor]:
    """A piece of the batch for each device, as even as can be; a batch that is too small leaves some without."""
    return list(x.tensor_split(min(devices, max(1, len(x)))))


def replicate(model: nn.Module, replicas: Sequence[nn.Module]) -> None:
    """Copy the weights to every other device: the last step has changed them."""
    for replica in replicas:
        for theirs, ours in zip(_tensors(replica), _tensors(model)):
            theirs.data.copy_(ours.data)


def parallel_apply(threads: ThreadPoolExecutor, function: Callable, *arguments: Sequence) -> list:
    """Call a function once a device, all at the same time, each on its own thread."""
    return list(threads.map(function, *arguments))


def gather(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """All outputs together on the first device, in the order of the batch."""
    return torch.cat([output.detach() for output in outputs])


def reduce(gradients: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    """Add up on the first device what every device found: one gradient a parameter."""
    found = ([part for part in parts if part is not None] for parts in zip(*gradients))
    return [sum(parts[1:], start=parts[0]) if parts else None for parts in found]


class DataParallel(nn.Module):
    """Called like the model; spreads every batch over several devices of one process, forward and backward."""

    def __init__(self, model: nn.Module, devices: int, timeline=None):
        super().__init__()
        self.module, self.devices = model, devices
        self.replicas = tuple(copy.deepcopy(model) for _ in range(devices))  # a tuple: none of parameters()
        for theirs, ours in zip(_tensors(self.replicas[0]), _tensors(model)):
            theirs.data = ours.data  # the first device works with the model's own weights
        self.threads = ThreadPoolExecutor(devices, thread_name_prefix="device")
        self.span = timeline.span if timeline else lambda kind: contextlib.nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return _Spread.apply(self, x, *self.learned(self.module))
        return self.run(x)[2]

    def run(self, x: torch.Tensor, graph: bool = False) -> tuple:
        """The four steps. Every thread decides for itself whether it records a graph for the backward pass."""

        def call(replica: nn.Module, piece: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(graph):
                return replica(piece)

        with self.span("scatter"):
            inputs = [piece.detach().requires_grad_(graph and x.requires_grad) for piece in scatter(x, self.devices)]
        with self.span("replicate"):
            for replica in self.replicas:
                _set_alike(replica, self.module)
            replicate(self.module, self.replicas[1:])
        with self.span("apply"):
            outputs = parallel_apply(self.threads, call, self.replicas, inputs)
        with self.span("gather"):
            return inputs, outputs, gather(outputs)

    @staticmethod
    def learned(model: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]


class _Spread(torch.autograd.Function):
    """Keeps each device's graph to itself: autograd would walk all of them on the one thread that calls backward."""

    @staticmethod
    def forward(ctx, parallel: DataParallel, x: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.parallel = parallel
        ctx.inputs, ctx.outputs, output = parallel.run(x, graph=True)
        return output

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        parallel, wants_input = ctx.parallel, ctx.needs_input_grad[1]

        def call(replica: nn.Module, piece: torch.Tensor, output: torch.Tensor, part: torch.Tensor) -> Sequence:
            leaves = [*parallel.learned(replica), *([piece] if wants_input else [])]
            return torch.autograd.grad(output, leaves, part, allow_unused=True)

        with parallel.span("scatter"):
            parts = gradient.split([len(output) for output in ctx.outputs])
        with parallel.span("apply"):
            found = parallel_apply(parallel.threads, call, parallel.replicas, ctx.inputs, ctx.outputs, parts)
        of_input = torch.cat([gradients[-1] for gradients in found]) if wants_input else None
        with parallel.span("reduce"):
            return None, of_input, *reduce([gradients[: -1 if wants_input else None] for gradients in found])


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


def _set_alike(replica: nn.Module, model: nn.Module) -> None:
    """What was frozen or told to train or evaluate since the replica was made must be so there too."""
    for theirs, ours in zip(replica.modules(), model.modules()):
        theirs.training = ours.training
    for theirs, ours in zip(replica.parameters(), model.parameters()):
        theirs.requires_grad = ours.requires_grad
