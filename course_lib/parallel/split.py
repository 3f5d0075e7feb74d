"""Cut a model into stages, from outside: nothing is copied, and the model knows nothing of it.

A model is seen as a chain of pieces between which a cut may lie. What crosses a cut is a tuple: the activation first, then
the skip connections that are still needed later, the newest first. A stage is a run of neighbouring pieces.

    stages = split(model, 2)              # two stages of about equal cost
    stages = split(model, cuts=[2])       # the first has two pieces, the second the rest

UNets and nn.Sequential are known; another net needs its pieces in `pieces`.
"""

import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_lib.config import UserError
from course_lib.timeline import unrecorded
from course_lib.unet import UNet

State = tuple[torch.Tensor, ...]


# ---- pieces ----------------------------------------------------------------------------------------------------------------


class Piece(nn.Module):
    """A part of a model that turns the state into the next one; it holds the model's own modules.

    keep_input  the first piece keeps the image, the oldest of the skips, if the last one will add it
    lean        recompute its activations in the backward pass instead of keeping them
    """

    def __init__(self, part: nn.Module, *, keep_input: bool = False, lean: bool = False):
        super().__init__()
        self.part, self.keep_input, self.lean = part, keep_input, lean

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.lean and self.training:
            return checkpoint(self.part, *inputs, use_reentrant=False)
        return self.part(*inputs)

    def forward(self, x: torch.Tensor, *skips: torch.Tensor) -> State:
        return self.run(x), *((x,) if self.keep_input else skips)


class Down(Piece):
    """A block of the way down: its output is pooled, and is also a skip."""

    def forward(self, x: torch.Tensor, *skips: torch.Tensor) -> State:
        y, *skips = super().forward(x, *skips)
        return F.max_pool2d(y, 2), y, *skips


class Up(Piece):
    """A block of the way up: it uses the newest skip."""

    def forward(self, x: torch.Tensor, skip: torch.Tensor, *skips: torch.Tensor) -> State:
        return self.run(x, skip), *skips


class Head(Piece):
    """The last convolution, which adds the image if that was kept."""

    def forward(self, x: torch.Tensor, *skips: torch.Tensor) -> State:
        y = self.run(x)
        return (y + skips[0][:, : y.shape[1]] if skips else y,)


def pieces(model: nn.Module) -> list[Piece]:
    """The parts of a model between which it may be cut, in the order of its forward pass."""
    if isinstance(model, nn.Sequential):
        return [Piece(part) for part in model]
    if not isinstance(model, UNet):
        raise UserError(
            f"{type(model).__name__} is neither a UNet nor an nn.Sequential: say in split.pieces where to cut"
        )
    options = {"lean": model.checkpointing}
    down = [Down(block, keep_input=model.residual and not n, **options) for n, block in enumerate(model.down)]
    bottom = Piece(model.bottom, keep_input=model.residual and not down, **options)
    up = [Up(block, **options) for block in model.up]
    return [*down, bottom, *up, Head(model.head)]


# ---- stages ----------------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A run of neighbouring pieces: state in, state out; a plain tensor where there are no skips beside it."""

    def __init__(self, parts: Sequence[Piece]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *state: torch.Tensor) -> torch.Tensor | State:
        for piece in self.parts:
            state = piece(*state)
        return state if len(state) > 1 else state[0]


def split(model: nn.Module, stages: int = 2, *, cuts: Sequence[int] | None = None, costs=None) -> list[Stage]:
    """Stages of a model: at these cuts, or so that the dearest stage is as cheap as it can be.

    cuts: [2, 3] makes stages of the pieces 0–1, 2 and 3 to the end. costs: seconds of each piece; else its parameters.
    """
    parts = pieces(model)
    if cuts is None:
        cuts = find_cuts(costs or [1 + sum(p.numel() for p in part.parameters()) for part in parts], stages)
    edges = [0, *cuts, len(parts)]
    if any(a >= b for a, b in zip(edges, edges[1:])):
        raise UserError(
            f"cuts {list(cuts)} are not there: {len(parts)} pieces can be cut after 1 to {len(parts) - 1}, in rising order"
        )
    return [Stage(parts[a:b]) for a, b in zip(edges, edges[1:])]


def find_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Where to cut so that the most expensive stage is as cheap as possible: by trying every place for the last cut."""
    if not 1 <= stages <= len(costs):
        raise UserError(
            f"{len(costs)} pieces can't make {stages} stages; use at most {len(costs)} (--devices, or the ranks of a pipeline), "
            "or a deeper net (--depth)"
        )
    best: dict[tuple[int, int], tuple[float, list[int]]] = {}
    for end in range(1, len(costs) + 1):
        best[1, end] = sum(costs[:end]), []
    for count in range(2, stages + 1):
        for end in range(count, len(costs) + 1):
            best[count, end] = min(
                (max(best[count - 1, cut][0], sum(costs[cut:end])), [*best[count - 1, cut][1], cut])
                for cut in range(count - 1, end)
            )
    return best[stages, len(costs)][1]


def measure_costs(parts: Sequence[Piece], x: torch.Tensor, *, repeats: int = 5) -> list[float]:
    """Seconds that each piece takes for forward and backward: the median of a few rounds, on a CPU."""
    rounds: list[list[float]] = []
    for _ in range(repeats):
        state, taken = (x,), []
        for part in parts:
            inputs = tuple(tensor.detach().requires_grad_() for tensor in state)
            began = time.perf_counter()
            state = part(*inputs)
            torch.autograd.backward(state, [torch.ones_like(tensor) for tensor in state])
            taken.append(time.perf_counter() - began)
        rounds.append(taken)
    for part in parts:
        part.zero_grad()
    return [statistics.median(times) for times in zip(*rounds)]


class Split(nn.Module):
    """A model over several devices in one process: each stage on its own, the state handed over from one to the next."""

    def __init__(self, model: nn.Module, devices: Sequence, *, cuts: Sequence[int] | None = None, timeline=None):
        super().__init__()
        self.devices, self.span = (
            [torch.device(device) for device in devices],
            timeline.span if timeline else unrecorded,
        )
        self.stages = nn.ModuleList(
            stage.to(device) for stage, device in zip(split(model, len(devices), cuts=cuts), self.devices)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: State = (x,)
        for number, (stage, device) in enumerate(zip(self.stages, self.devices)):
            with self.span(f"device {number}"):
                state = stage(*(tensor.to(device, non_blocking=True) for tensor in state))
            state = state if isinstance(state, tuple) else (state,)
        return state[0].to(x.device)  # where the targets are
