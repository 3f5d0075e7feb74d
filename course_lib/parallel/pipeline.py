"""A pipeline: each rank has one stage of the model, and micro-batches follow each other through the stages.

GPipe by hand: all micro-batches forward, then all backward, in the opposite order. Gradients add up over the micro-batches, as
in plain accumulation, so the result is that of one process with the whole batch. A rank idles while the pipeline fills and
drains: of m + p − 1 slots, p − 1 are empty (p stages, m micro-batches).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.config import UserError
from course_lib.parallel.split import Stage, State
from course_lib.timeline import unrecorded


def bubble(stages: int, micro_batches: int) -> float:
    """The share of its time that a rank idles, if all stages take equally long: (p − 1)/(m + p − 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


class Tensor(NamedTuple):
    """What is known about a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool  # a gradient will come back for it; for the image that is only passed on, none does

    def make(self, device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.learns)


def crossings(stages: Sequence[Stage], x: torch.Tensor) -> list[list[Tensor]]:
    """What enters each stage, and at last what leaves the last one. Nothing is computed: weights and images have no values."""
    state: State = (x.to("meta"),)
    found = [[Tensor(tuple(t.shape), t.dtype, False) for t in state]]
    for stage in stages:
        weights = {name: p.detach().to("meta").requires_grad_(p.requires_grad) for name, p in stage.named_parameters()}
        weights |= {name: buffer.to("meta") for name, buffer in stage.named_buffers()}
        state = _as_tuple(torch.func.functional_call(stage, weights, state))
        found.append([Tensor(tuple(t.shape), t.dtype, t.requires_grad) for t in state])
    return found


def _as_tuple(state) -> State:
    return state if isinstance(state, tuple) else (state,)


class GPipe:
    """This rank's part of the pipeline. `group` holds the ranks of the stages, in their order."""

    def __init__(self, stages: Sequence[Stage], x: torch.Tensor, *, micro_batches: int, group=None, timeline=None):
        self.group, self.micro_batches = group, micro_batches
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.number = self.ranks.index(dist.get_rank())
        if len(stages) != len(self.ranks):
            raise UserError(f"{len(stages)} stages need {len(stages)} ranks, and there are {len(self.ranks)}")
        if len(x) % micro_batches:
            raise UserError(f"a batch of {len(x)} can't be cut into {micro_batches} micro-batches of equal size")
        self.stage, self.span = stages[self.number], timeline.span if timeline else unrecorded
        self.device = x.device
        crossing = crossings(stages, x[: len(x) // micro_batches])
        self.entering, self.leaving = crossing[self.number], crossing[self.number + 1]
        self.first, self.last = self.number == 0, self.number == len(stages) - 1

    # ---- messages

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> list[dist.Work]:
        """Start to send; a skip's gradient is a slice of a larger tensor, and gloo wants it in one piece."""
        return [dist.isend(tensor.detach().contiguous(), self.ranks[to], group=self.group) for tensor in tensors]

    def expect(self, expected: Sequence[Tensor], source: int) -> tuple[list[torch.Tensor], list[dist.Work]]:
        """Make room for tensors, and let them come."""
        tensors = [one.make(self.device) for one in expected]
        return tensors, [dist.irecv(tensor.detach(), self.ranks[source], group=self.group) for tensor in tensors]

    def arrivals(self, expected: Sequence[Tensor], source: int) -> Iterator[list[torch.Tensor]]:
        """What comes for each micro-batch; while one is computed with, the next may already come."""
        coming = self.expect(expected, source)
        for left in reversed(range(self.micro_batches)):
            tensors, under_way = coming
            for work in under_way:
                work.wait()
            if left:
                coming = self.expect(expected, source)
            yield tensors

    def states(self, x: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """What enters this stage for each micro-batch: images, or what the stage before has made of them."""
        if self.first:
            return ([images] for images in x.chunk(self.micro_batches))
        return self.arrivals(self.entering, self.number - 1)

    # ---- a step

    def step(self, x: torch.Tensor, y: torch.Tensor, measure: Callable) -> torch.Tensor:
        """Forward and backward of a whole batch; gradients are there afterwards. The loss is known on the last rank only."""
        kept, losses, under_way = [], [], []
        states = self.states(x)
        for targets in y.chunk(self.micro_batches):
            with self.span("wait"):
                state = next(states)
            with self.span("forward"):
                out = _as_tuple(self.stage(*state))
                if self.last:
                    losses.append(measure(out[0], targets) / self.micro_batches)
            if not self.last:
                under_way += self.send(out, self.number + 1)
            kept.append((state, out))
        gradients = self.arrivals([one for one in self.leaving if one.learns], self.number + 1)
        for number in reversed(range(self.micro_batches)):
            state, out = kept.pop()
            with self.span("wait"):
                gradient = None if self.last else next(gradients)
            with self.span("backward"):
                if self.last:
                    losses[number].backward()
                else:
                    torch.autograd.backward([tensor for tensor in out if tensor.requires_grad], gradient)
            if not self.first:
                under_way += self.send([tensor.grad for tensor in state if tensor.requires_grad], self.number - 1)
        with self.span("wait"):
            for work in under_way:
                work.wait()
        return torch.stack(losses).sum().detach() if losses else x.new_zeros(())

    @torch.no_grad()
    def evaluate(self, x: torch.Tensor) -> torch.Tensor | None:
        """Forward alone; the output is known on the last rank only."""
        outputs = []
        for state in self.states(x):
            out = _as_tuple(self.stage(*state))
            if self.last:
                outputs.append(out[0])
            else:
                for work in self.send(out, self.number + 1):
                    work.wait()
        return torch.cat(outputs) if outputs else None


def torch_schedule(
    name: str, stages: Sequence[Stage], x: torch.Tensor, *, micro_batches: int, measure: Callable, group=None
):
    """torch.distributed.pipelining's own schedule over the same stages: "gpipe" or "1f1b"."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    if name == "1f1b" and micro_batches < len(stages):
        raise UserError(f"1F1B over {len(stages)} stages needs at least as many micro-batches, not {micro_batches}")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    number = ranks.index(dist.get_rank())
    crossing = crossings(stages, x[: len(x) // micro_batches])
    inputs, outputs = (tuple(one.make("meta") for one in crossing[place]) for place in (number, number + 1))
    part = PipelineStage(
        Contiguous(stages[number]), number, len(stages), x.device, input_args=inputs, output_args=outputs, group=group
    )
    return {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](part, micro_batches, loss_fn=measure)


class Contiguous(nn.Module):
    """A stage whose inputs' gradients lie in one piece: those of skips are slices, which gloo refuses to send."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage

    def forward(self, *state: torch.Tensor):
        for tensor in state:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient.contiguous())
        return self.stage(*state)
