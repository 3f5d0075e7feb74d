"""Tensor parallel: the weights of single layers over all ranks, which all see the same samples.

A block is two convolutions. The first is cut by its output channels: each rank needs the whole input and computes some of the
channels. The second is cut by its input channels: each rank has just those that it needs, and what the ranks find is summed.
One all-reduce in forward, one in backward. DTensor does both, and knows which part of a weight is here.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from course_lib.config import Config, UserError
from course_lib.parallel.ddp import start_equal
from course_lib.unet import Block, UNet
from course_lib.world import World


class ColumnConv2d(nn.Conv2d):
    """Some of the output channels. Everybody's input is the same; its gradient is the sum of what all have to say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh = self.weight.device_mesh
        x = DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        bias = None if self.bias is None else self.bias.to_local()
        return self._conv_forward(x, self.weight.to_local(), bias)


class ChannelGroupNorm(nn.GroupNorm):
    """Whole groups of channels lie on one rank, so nothing has to be sent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = self.num_groups // self.weight.device_mesh.size()
        return F.group_norm(x, groups, self.weight.to_local(), self.bias.to_local(), self.eps)


class RowConv2d(nn.Conv2d):
    """What some of the input channels give, summed over the ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self._conv_forward(x, self.weight.to_local(), None)
        whole = DTensor.from_local(part, self.weight.device_mesh, [Partial()]).redistribute(placements=[Replicate()])
        return whole.to_local() if self.bias is None else whole.to_local() + self.bias[:, None, None]


def cut(block: Block, mesh: DeviceMesh) -> None:
    """Let a block work on several ranks, in place: its weights become DTensors, their names stay."""
    first, norm, _, second, *_ = block.layers
    if first.out_channels % mesh.size():
        raise UserError(f"{first.out_channels} channels can't be shared by {mesh.size()} ranks: change --width")
    if isinstance(norm, nn.BatchNorm2d):
        raise UserError("BatchNorm over channels of several ranks is not supported: use --norm group or none")
    if isinstance(norm, nn.GroupNorm):
        if norm.num_groups % mesh.size():
            raise UserError(
                f"{norm.num_groups} groups of channels can't be shared by {mesh.size()} ranks: change --width, or use "
                "--norm none"
            )
        norm.__class__ = ChannelGroupNorm
        place(norm, mesh, weight=Shard(0), bias=Shard(0))
    first.__class__, second.__class__ = ColumnConv2d, RowConv2d
    place(first, mesh, weight=Shard(0), bias=Shard(0))  # (output channel, input channel, y, x)
    place(second, mesh, weight=Shard(1))


def place(module: nn.Module, mesh: DeviceMesh, **placements: Shard) -> None:
    """Keep this rank's part of these parameters."""
    for name, placement in placements.items():
        whole = getattr(module, name)
        if whole is not None:
            setattr(module, name, nn.Parameter(distribute_tensor(whole.data, mesh, [placement], src_data_rank=None)))


def tensor_parallel(model: UNet, world: World, config: Config = Config(), timeline=None):
    """The UNet's lowest level over all ranks: it has about half of all weights."""
    start_equal(model, world)
    cut(model.bottom, init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("tensor",)))
    return model, lambda: None
