"""Pipelines and strips as strategies of the trainer: ranks that share a model see the same samples.

The model stays whole on every rank, so that checkpoints look like anybody's; but a rank has gradients and an optimizer's state
only for its own stage. While a checkpoint is written, `bring_together` has brought the others'; `let_go` drops them again.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from course_lib.config import Config, UserError
from course_lib.parallel.ddp import add_up, make_buckets, start_equal
from course_lib.parallel.pipeline import GPipe, torch_schedule
from course_lib.parallel.spatial import spread, strip
from course_lib.parallel.split import split
from course_lib.timeline import unrecorded
from course_lib.world import World


def ranks_a_copy(config: Config, world: World) -> int:
    """How many ranks share one copy of the model, and therefore the same samples."""
    if config.strategy in ("pipeline_naive", "pipeline_gpipe", "pipeline_1f1b", "spatial", "tp"):
        return world.world_size
    return config.devices if config.strategy == "hybrid" else 1


def world_of_data(config: Config, world: World) -> World:
    """This rank's place among the copies of the model: which part of the data it sees."""
    share = ranks_a_copy(config, world)
    if world.world_size == 1:
        return world
    if world.world_size % share:
        fits = world.world_size // share * share or share
        raise UserError(
            f"{world.world_size} ranks can't be divided into copies of --devices {share} stages; start {fits}"
        )
    return replace(world, rank=world.rank // share, world_size=world.world_size // share)


class Pipeline(nn.Module):
    """One stage a rank. `forward_backward` is a whole training step's; forward gives the output to all its ranks."""

    def __init__(self, model: nn.Module, world: World, config: Config, timeline=None, *, schedule: str = "naive"):
        super().__init__()
        if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
            raise UserError("BatchNorm in a pipeline would see micro-batches: use --norm group or none")
        if config.batch % config.micro_batches:
            raise UserError(
                f"--batch {config.batch} can't be cut into --micro-batches {config.micro_batches} of equal size"
            )
        start_equal(model, world)
        share = ranks_a_copy(config, world)
        firsts = range(0, world.world_size, share)
        self.group = [dist.new_group(list(range(first, first + share))) for first in firsts][world.rank // share]
        across = [dist.new_group(list(range(number, world.world_size, share))) for number in range(share)]
        self.copies, self.fellows = world.world_size // share, across[world.rank % share]
        self.module, self.schedule, self.micro_batches, self.timeline = model, schedule, config.micro_batches, timeline
        self.stages = split(model, share)
        self.number, self.last = world.rank % share, world.rank // share * share + share - 1  # the last stage's rank
        self.stage, self.pipes, self.theirs = self.stages[self.number], {}, None
        self.buckets = make_buckets(list(self.stage.parameters()), config.bucket_mb) if self.copies > 1 else []

    def pipe(self, x: torch.Tensor, micro_batches: int) -> GPipe:
        """Images of each size have their own shapes between the stages."""
        key = (*x.shape, micro_batches)
        if key not in self.pipes:
            options = {"micro_batches": micro_batches, "group": self.group, "timeline": self.timeline}
            self.pipes[key] = GPipe(self.stages, x, **options)
        return self.pipes[key]

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor, measure: Callable) -> torch.Tensor:
        if self.schedule == "naive":
            loss = self.pipe(x, self.micro_batches).step(x, y, measure)
        else:
            loss = self._torch_step(x, y, measure)
        with self.timeline.span("wait") if self.timeline else unrecorded("wait"):
            dist.broadcast(loss, self.last, group=self.group)
        return loss

    def _torch_step(self, x: torch.Tensor, y: torch.Tensor, measure: Callable) -> torch.Tensor:
        is_last = self.number == len(self.stages) - 1
        if self.theirs is None:
            options = {"micro_batches": self.micro_batches, "measure": measure, "group": self.group}
            self.theirs = torch_schedule(self.schedule, self.stages, x, **options)
        losses: list[torch.Tensor] = []
        self.theirs.step(*([x] if self.number == 0 else []), **({"target": y, "losses": losses} if is_last else {}))
        return torch.stack(losses).mean().detach() if is_last else x.new_zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.pipe(x, 1).evaluate(x)
        if output is None:
            shape = (len(x), self.module.outputs, *x.shape[-2:])
            output = torch.empty(shape, dtype=x.dtype, device=x.device)
        dist.broadcast(output, self.last, group=self.group)
        return output

    def sync(self) -> None:
        """The copies of a stage average their gradients, as in DDP."""
        add_up(self.buckets, self.copies, self.timeline, self.fellows)

    @torch.no_grad()
    def bring_together(self, optimizer: torch.optim.Optimizer) -> None:
        """Every rank gets the weights and the optimizer's state of all stages."""
        ranks = dist.get_process_group_ranks(self.group)
        for number, stage in enumerate(self.stages):
            for parameter in stage.parameters():
                state = optimizer.state[parameter]
                if not state:  # of another stage: room for what comes
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                for tensor in (parameter.data, *state.values()):
                    there = tensor.to(parameter.device)  # Adam counts its steps on the CPU
                    dist.broadcast(there, ranks[number], group=self.group)
                    tensor.copy_(there)

    def let_go(self, optimizer: torch.optim.Optimizer) -> None:
        """After a checkpoint was written or read: only the state of this rank's stage is kept."""
        for parameter in set(optimizer.state) - set(self.stage.parameters()):
            del optimizer.state[parameter]


def pipeline_step(model: Pipeline, batch, optimizer, sync: Callable, span, measure: Callable) -> torch.Tensor:
    """The trainer's train_step for a pipeline, in which some micro-batches go forward while others go backward."""
    optimizer.zero_grad()
    loss = model.forward_backward(*batch, measure)
    with span("sync"):
        sync()
    with span("update"):
        optimizer.step()
    return loss


def pipeline(schedule: str):
    """A strategy: our own GPipe ("naive"), or torch's "gpipe" or "1f1b"."""

    def strategy(model: nn.Module, world: World, config: Config = Config(), timeline=None):
        wrapped = Pipeline(model, world, config, timeline, schedule=schedule)
        return wrapped, wrapped.sync

    return strategy


# ---- strips ----------------------------------------------------------------------------------------------------------------


class GatherStrips(torch.autograd.Function):
    """All ranks get the whole output; of its gradient, which all of them compute, each needs its own strip."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = x.shape[-2]
        strips = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(strips, x.contiguous())
        return torch.cat(strips, dim=-2)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient.split(ctx.rows, dim=-2)[dist.get_rank()].contiguous()


class Strips(nn.Module):
    """A model whose ranks each have a strip of every image. Outside, whole images go in and come out."""

    def __init__(self, model: nn.Module, world: World, config: Config, timeline=None):
        super().__init__()
        self.buckets = make_buckets(start_equal(model, world), config.bucket_mb)
        self.module, self.depth, self.timeline = spread(model), config.depth, timeline

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return GatherStrips.apply(self.module(strip(x, depth=self.depth)))

    def sync(self) -> None:
        """Each rank's gradients are those of its strip's part of the loss: they add up."""
        add_up(self.buckets, 1, self.timeline)


def spatial(model: nn.Module, world: World, config: Config = Config(), timeline=None):
    """Every image over all ranks, in strips with halos."""
    wrapped = Strips(model, world, config, timeline)
    return wrapped, wrapped.sync
