"""Sharding: each of n ranks keeps 1/n of what training needs, and all see different samples, as in DDP.

ZeRO by hand, stage 1 (the optimizer's state) and 2 (gradients too); then FSDP, torch's own stage 3 (weights too), over all
ranks or in groups of them (HSDP).
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_lib.config import Config, UserError
from course_lib.parallel.ddp import start_equal
from course_lib.unet import UNet
from course_lib.world import World


def blocks(model: nn.Module) -> list[nn.Module]:
    """What is shared out as one: each block of the UNet, each layer of BERT. The head is left."""
    return [*model.down, model.bottom, *model.up] if isinstance(model, UNet) else list(model.layers)


# ---- ZeRO by hand ----------------------------------------------------------------------------------------------------------


class Piece:
    """The weights of one block side by side in one tensor, and this rank's 1/n of it: `mine`."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World):
        self.parameters, self.rank, self.ranks = list(parameters), world.rank, world.world_size
        self.missing = len(self.parameters)  # gradients that backward has not reached yet
        self.weights = self.side_by_side([parameter.data for parameter in self.parameters])
        for parameter, view in zip(self.parameters, self.views(self.weights)):
            parameter.data = view
        self.mine = nn.Parameter(self.weights.chunk(self.ranks)[self.rank])  # a view: to change it changes the model

    @property
    def room(self) -> int:
        """Zeros at the end, so that all ranks get equally much."""
        return -sum(parameter.numel() for parameter in self.parameters) % self.ranks

    def side_by_side(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*(tensor.flatten() for tensor in tensors), tensors[0].new_zeros(self.room)])

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The way back: each parameter's part of such a tensor, in its shape."""
        parts = flat.split([*(parameter.numel() for parameter in self.parameters), self.room])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters)]

    def all_reduce(self) -> None:
        """Stage 1: everybody gets all gradients, as in DDP, and uses 1/n of them."""
        gradients = self.side_by_side([parameter.grad for parameter in self.parameters]) / self.ranks
        dist.all_reduce(gradients)
        self.mine.grad = gradients.chunk(self.ranks)[self.rank]
        for parameter, view in zip(self.parameters, self.views(gradients)):
            parameter.grad = view

    def reduce_scatter(self, _=None) -> None:
        """Stage 2: when backward has reached the block's last gradient, everybody gets its 1/n; the rest is let go."""
        self.missing -= 1
        if self.missing == 0:
            gradients = self.side_by_side([parameter.grad for parameter in self.parameters]) / self.ranks
            self.mine.grad = torch.empty_like(self.mine)
            dist.reduce_scatter_single(self.mine.grad, gradients)
            self.missing = len(self.parameters)
            for parameter in self.parameters:
                parameter.grad = None

    def all_gather(self) -> None:
        """Everybody gets the weights that the others have updated."""
        dist.all_gather_single(self.weights, self.mine.data.clone())


class ShardedAdam:
    """Adam over all ranks: each updates 1/n of the weights, and has Adam's two averages for those alone."""

    def __init__(self, model: UNet, world: World, *, stage: int = 1, lr: float = 1e-3):
        start_equal(model, world)
        self.model, self.stage = model, stage
        self.pieces = [Piece(list(block.parameters()), world) for block in [*blocks(model), model.head]]
        self.adam = torch.optim.Adam([piece.mine for piece in self.pieces], lr=lr)
        for piece in self.pieces if stage == 2 else ():
            for parameter in piece.parameters:
                parameter.register_post_accumulate_grad_hook(piece.reduce_scatter)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        for piece in self.pieces if self.stage == 1 else ():
            piece.all_reduce()
        self.adam.step()
        for piece in self.pieces:
            piece.all_gather()


# ---- FSDP and HSDP ---------------------------------------------------------------------------------------------------------


def make_mesh(device: str, *shape: int) -> DeviceMesh:
    """The ranks in a line, or in a table of (groups, ranks in each)."""
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(model: UNet, mesh: DeviceMesh, **options) -> UNet:
    """FSDP2 over a line of ranks; over a table it is HSDP: sharded inside a group, replicated across the groups."""
    from torch.distributed.fsdp import fully_shard  # an import of two seconds, which no other strategy needs

    for block in blocks(model):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(model: UNet, world: World, config: Config = Config(), timeline=None):
    """Weights, gradients and optimizer state over all ranks. The gradients are averaged where they are scattered."""
    start_equal(model, world)
    return shard(model, make_mesh(world.device.type, world.world_size)), lambda: None


def hsdp(model: UNet, world: World, config: Config = Config(), timeline=None):
    """FSDP in groups of --devices ranks, DDP between the groups."""
    if world.world_size % config.devices:
        fits = world.world_size // config.devices * config.devices or config.devices
        raise UserError(
            f"{world.world_size} ranks can't be divided into groups of --devices {config.devices}; start {fits}"
        )
    start_equal(model, world)
    groups = world.world_size // config.devices
    return shard(model, make_mesh(world.device.type, groups, config.devices)), lambda: None


# ---- what a rank has to keep -----------------------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: of a DTensor, or all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this rank keeps between two steps, counted."""
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {
        "weights": [*model.parameters(), *mine],
        "gradients": [p.grad for p in (*model.parameters(), *mine) if p.grad is not None],
        "optimizer": [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim],
    }
    storages = {name: [local(tensor).untyped_storage() for tensor in several] for name, several in tensors.items()}
    unique = {name: {one.data_ptr(): one.nbytes() for one in several} for name, several in storages.items()}
    return {name: sum(sizes.values()) for name, sizes in unique.items()}


def needed(model: nn.Module, ranks: int, *, stage: int) -> dict[str, int]:
    """Bytes that a rank must keep, by ZeRO's formula: stage 0 is DDP, 3 is FSDP. A little more where n does not divide."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    wholes = {"weights": (size, 3), "gradients": (size, 2), "optimizer": (2 * size, 1)}
    return {name: math.ceil(whole / ranks) if stage >= first else whole for name, (whole, first) in wholes.items()}
