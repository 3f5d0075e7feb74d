"""Spatial parallelism: every rank has a strip of each image, and neighbours exchange the rows that a convolution reaches into.

    spread(model, group)          # the same modules and weights, but those that look beyond their strip now ask for the rest
    strip(images, group)          # this rank's rows of (batch, channel, y, x)

A 3 × 3 convolution reads one row of each neighbour, its *halo*; its gradient travels back the same way. A normalisation adds up
its sums over all strips. Everything else in a UNet looks at one place at a time, as long as strips can be halved evenly.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.config import UserError

ALONE = (nn.Identity, nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh)  # they look at one place at a time
UP, DOWN = 0, 1  # tags: rows that travel to the rank above, and to the one below


def strip(images: torch.Tensor, group=None, *, depth: int = 0) -> torch.Tensor:
    """This rank's rows; all strips are equal, and can be halved `depth` times."""
    ranks, height = dist.get_world_size(group), images.shape[-2]
    if height % (ranks * 2**depth):
        raise UserError(
            f"images of {height} rows can't be shared by {ranks} ranks that halve them {depth} times: the number of rows "
            f"must be a multiple of {ranks * 2**depth}"
        )
    return images.tensor_split(ranks, dim=-2)[dist.get_rank(group)].contiguous()


def swap(first: torch.Tensor, last: torch.Tensor, group, circular: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Send `first` up and `last` down; returns what comes from above and from below, zeros where nobody is."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    here, count = ranks.index(dist.get_rank()), len(ranks)
    above = ranks[here - 1] if here or circular else None
    below = ranks[(here + 1) % count] if here < count - 1 or circular else None
    from_above, from_below = torch.zeros_like(last), torch.zeros_like(first)
    messages = (  # in this order: NCCL knows no tags, and two ranks in a circle are each other's neighbours twice
        (dist.isend, first.contiguous(), above, UP),
        (dist.isend, last.contiguous(), below, DOWN),
        (dist.irecv, from_below, below, UP),
        (dist.irecv, from_above, above, DOWN),
    )
    work = [dist.P2POp(how, rows, peer, group, tag) for how, rows, peer, tag in messages if peer is not None]
    for one in dist.batch_isend_irecv(work) if work else ():
        one.wait()
    return from_above, from_below


class Halo(torch.autograd.Function):
    """(…, y, x) → (…, y + 2·rows, x): the neighbours' rows above and below. Backward gives their gradients back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, rows: int, group, circular: bool) -> torch.Tensor:
        if x.shape[-2] < rows:
            raise UserError(f"a strip of {x.shape[-2]} rows is too small for a halo of {rows}: use fewer ranks")
        ctx.rows, ctx.group, ctx.circular = rows, group, circular
        above, below = swap(x[..., :rows, :], x[..., -rows:, :], group, circular)
        return torch.cat([above, x, below], dim=-2)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        rows = ctx.rows
        inner = gradient[..., rows:-rows, :].clone()
        above, below = swap(gradient[..., :rows, :], gradient[..., -rows:, :], ctx.group, ctx.circular)
        inner[..., :rows, :] += above
        inner[..., -rows:, :] += below
        return inner, None, None, None


class SumOverStrips(torch.autograd.Function):
    """An all-reduce that gradients pass through: each rank's loss depends on everybody's part of the sum."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return SumOverStrips.forward(ctx, gradient.contiguous(), ctx.group), None


class StripConv2d(nn.Conv2d):
    """A convolution of a strip: what lies above and below comes from the neighbours, left and right are here."""

    group = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, across = self.padding
        if down:
            x = Halo.apply(x, down, self.group, self.padding_mode == "circular")
        if self.padding_mode == "circular" and across:
            x, across = F.pad(x, (across, across, 0, 0), mode="circular"), 0
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, across), self.dilation, self.groups)


class StripGroupNorm(nn.GroupNorm):
    """GroupNorm with mean and variance of the whole image, by sums over the strips."""

    group = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.unflatten(1, (self.num_groups, -1))  # (batch, group, channel, y, x)
        count = grouped[0, 0].numel() * dist.get_world_size(self.group)
        mean = SumOverStrips.apply(grouped.sum(dim=(2, 3, 4), keepdim=True), self.group) / count
        variance = SumOverStrips.apply((grouped - mean).square().sum(dim=(2, 3, 4), keepdim=True), self.group) / count
        normal = ((grouped - mean) * torch.rsqrt(variance + self.eps)).flatten(1, 2)
        return normal * self.weight[:, None, None] + self.bias[:, None, None]


def spread(model: nn.Module, group=None) -> nn.Module:
    """Let a model work on strips, in place: its weights and their names stay. What it does not know it refuses."""
    strips = {nn.Conv2d: StripConv2d, nn.GroupNorm: StripGroupNorm}
    found = [module for module in model.modules() if type(module) in strips]
    for module in model.modules():
        known = type(module) in strips or isinstance(module, (*ALONE, nn.ModuleList)) or list(module.children())
        if not known or (type(module) is nn.Conv2d and not keeps_the_size(module)):
            raise UserError(
                f"{module} can't work on strips: convolutions of stride 1 and dilation 1 with an odd kernel that keep the "
                "size of their image, padded by zeros or in a circle, GroupNorm (--norm group) and simple activations can"
            )
    for module in found:
        module.__class__, module.group = strips[type(module)], group
    return model


def keeps_the_size(conv: nn.Conv2d) -> bool:
    """Whether it reads equally far up and down, to places that are another strip's, zeros, or the other side's."""
    plain = set(conv.stride) == set(conv.dilation) == {1} and conv.padding_mode in ("zeros", "circular")
    return (
        plain and all(size % 2 for size in conv.kernel_size) and conv.padding == tuple(n // 2 for n in conv.kernel_size)
    )
