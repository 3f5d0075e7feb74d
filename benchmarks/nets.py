"""The UNets that benchmarks.ddp compares with ours, each with the options that make it most like ours.

The course needs none of them: one that can't be imported is named with how to get it, and left out. milesial's is not on
PyPI and under the GPL, so there is no copy of it here:

    git clone https://github.com/milesial/Pytorch-UNet /tmp/Pytorch-UNet
    PYTHONPATH=/tmp/Pytorch-UNet python -m benchmarks.ddp --only unet

All go back up by the skips of the way down, with two 3×3 convolutions on each level. How the image grows is each one's own:
ours halves the channels by a 1×1 convolution and repeats every value; milesial and MONAI do both by a transposed convolution.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.table import keep_memory, take_turns
from course_lib.unet import UNet

CHANNELS, BATCH = 6, 8


class Peer(NamedTuple):
    """Somebody else's UNet, how to get it, and the options of ours that make the two alike."""

    name: str
    install: str
    make: Callable[[], nn.Module]
    like: dict


def milesial() -> nn.Module:
    from unet.unet_model import UNet as Milesial  # PyPI has another `unet`, without this module

    return Milesial(CHANNELS, CHANNELS)


def monai() -> nn.Module:
    from monai.networks.nets import BasicUNet

    features = (16, 32, 64, 128, 256, 16)
    like_ours = {"act": ("relu", {"inplace": True}), "norm": ("group", {"num_groups": 8}), "bias": False}
    return BasicUNet(2, CHANNELS, CHANNELS, features, **like_ours)


def smp() -> nn.Module:
    """Of its encoders this one is most like ours; it has two convolutions more at the bottom."""
    from segmentation_models_pytorch import Unet

    options = {"encoder_weights": None, "in_channels": CHANNELS, "classes": CHANNELS}
    return Unet("vgg13_bn", encoder_depth=3, decoder_channels=(256, 128, 64), **options)


PEERS = (
    Peer("MONAI BasicUNet", "pip install monai", monai, {"width": 16, "depth": 4, "norm": "group"}),
    Peer(
        "segmentation_models_pytorch Unet, vgg13_bn",
        "pip install segmentation-models-pytorch",
        smp,
        {"width": 64, "depth": 3, "norm": "batch"},
    ),
    Peer(
        "milesial Pytorch-UNet",
        "git clone https://github.com/milesial/Pytorch-UNet, and put it on PYTHONPATH",
        milesial,
        {"width": 64, "depth": 4, "norm": "batch"},
    ),
)


class Measured(NamedTuple):
    """CPU seconds of a training step, one number a round; and what such a step is made of."""

    seconds: list[float]
    parameters: int
    gflop: float

    def __str__(self) -> str:
        return f"{self.parameters / 1e6:.3g}M {self.gflop:.3g}GFLOP"


def make_step(model: nn.Module, size: int) -> Callable[[], None]:
    x, y = torch.randn(2, BATCH, CHANNELS, size, size, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()

    return step


def measure(models: dict[str, nn.Module], *, size: int, steps: int, rounds: int) -> dict[str, Measured]:
    """Let models take turns: forward and backward, in CPU time, which doesn't count other programs' turns."""
    keep_memory()
    made = {name: make_step(model, size) for name, model in models.items()}
    gflop = {}
    for name, step in made.items():
        with FlopCounterMode(display=False) as counter:  # its first step warms it up too
            step()
        gflop[name] = counter.get_total_flops() / 1e9

    def cpu_seconds(step: Callable[[], None]) -> float:
        began = time.process_time()
        for _ in range(steps):
            step()
        return (time.process_time() - began) / steps

    seconds = take_turns({name: lambda step=step: cpu_seconds(step) for name, step in made.items()}, rounds)
    counts = {name: sum(p.numel() for p in model.parameters() if p.grad is not None) for name, model in models.items()}
    return {name: Measured(seconds[name], counts[name], gflop[name]) for name in models}


def our_models(**options) -> dict[str, nn.Module]:
    """Ours with either padding: the peers have zeros beyond the edge, the course's planet has no edge."""
    return {padding: UNet(CHANNELS, CHANNELS, padding=padding, **options) for padding in ("zeros", "circular")}
