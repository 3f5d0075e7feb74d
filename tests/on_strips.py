"""What ranks do in test_spatial.py: each has a strip of every image, and compares with the whole.

torchrun --standalone --nproc-per-node 2 tests/on_strips.py
"""

import copy
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib import simulate
from course_lib.config import Config
from course_lib.parallel.ddp import naive
from course_lib.parallel.spatial import spread, strip
from course_lib.unet import UNet
from course_lib.world import start, stop


def same(mine: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    difference = (mine - whole).abs().max()
    assert difference < 1e-11 * (1 + whole.abs().max()), f"{what} is off by {difference}"


def check_conv(kernel: tuple[int, int], padding: str, height: int) -> None:
    """One convolution: outputs, the image's gradient and the weights' gradient, borders included."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, kernel, padding=tuple(k // 2 for k in kernel), padding_mode=padding).double()
    x = torch.randn(2, 3, height, 9, dtype=torch.float64, requires_grad=True)
    out = conv(x)
    weight = torch.randn_like(out)
    expected = torch.autograd.grad((out * weight).sum(), [x, *conv.parameters()])
    mine = strip(x.detach()).requires_grad_()
    spread(conv)
    with simulate.Traffic() as traffic:
        part = conv(mine)
    what = f"kernel {kernel}, {padding}, {height} rows"
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    neighbours = 2 if padding == "circular" or 0 < rank < last else 1
    assert traffic.sent == 2 * 3 * (kernel[0] // 2) * 9 * 8 * neighbours, f"{what}: {traffic.messages}"
    same(part, strip(out.detach()), what)
    gradient, *of_weights = torch.autograd.grad((part * strip(weight)).sum(), [mine, *conv.parameters()])
    same(gradient, strip(expected[0]), f"{what}: gradient of the image")
    for name, found, whole in zip(("weight", "bias"), of_weights, expected[1:]):
        dist.all_reduce(found)
        same(found, whole, f"{what}: gradient of the {name}")


def check_unet(world, depth: int, norm: str, padding: str, residual: bool) -> None:
    """Three steps of SGD: loss, output and weights; with one row a strip at the lowest level, or two."""
    torch.manual_seed(1)
    whole = UNet(3, 2, width=4, depth=depth, norm=norm, padding=padding, residual=residual).double()
    nn.init.normal_(whole.head.weight)
    parts, sync = naive(spread(copy.deepcopy(whole)), world)
    assert list(parts.state_dict()) == list(whole.state_dict())
    height = 2**depth * world.world_size * (1 if residual else 2)
    x, y = (torch.randn(2, c, height, 11, dtype=torch.float64) for c in (3, 2))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (whole, parts)]
    what = f"depth {depth}, {norm}, {padding}, {height} rows"
    for _ in range(3):
        losses = []
        for net, optimizer, (images, targets) in zip(
            (whole, parts), optimizers, ((x, y), [strip(t, depth=depth) for t in (x, y)])
        ):
            optimizer.zero_grad()
            losses.append(F.mse_loss(net(images), targets))
            losses[-1].backward()
            if net is parts:
                sync()
            optimizer.step()
        mean = losses[1].detach().clone()
        dist.all_reduce(mean)
        same(mean / world.world_size, losses[0].detach(), f"{what}: loss")
    for (name, a), b in zip(parts.named_parameters(), whole.parameters()):
        same(a.detach(), b.detach(), f"{what}: {name}")
    same(parts(strip(x)).detach(), strip(whole(x).detach()), f"{what}: output")


def main() -> None:
    world = start(Config(timeout=60))
    done = 0
    for kernel, padding, rows in itertools.product(
        [(1, 1), (3, 3), (5, 3), (1, 3), (7, 1)], ("zeros", "circular"), (3, 4)
    ):
        check_conv(kernel, padding, rows * world.world_size)
        done += 1
    for depth, norm, padding, residual in itertools.product(
        (0, 1, 2), ("group", "none"), ("zeros", "circular"), (False, True)
    ):
        check_unet(world, depth, norm, padding, residual)
        done += 1
    print(f"rank {world.rank}: {done} times equal to the whole", flush=True)
    stop(world)


if __name__ == "__main__":
    main()
