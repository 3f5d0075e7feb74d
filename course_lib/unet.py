"""The UNet, and what it costs: parameters and memory predicted by formulas that lesson 01 checks against reality.

It knows nothing of ranks. Every level is two convolutions; going down the image halves and the channels double.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Twice: 3×3 convolution, normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, *, norm: str, padding: str):
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv2d(channels, outputs, 3, padding=1, padding_mode=padding, bias=norm == "none"),
                make_norm(norm, outputs),
                nn.ReLU(inplace=True),
            ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Up(nn.Module):
    """Grow the image to the size of the skip, put the two side by side, then a block."""

    def __init__(self, channels: int, **options):
        super().__init__()
        self.thin = nn.Conv2d(2 * channels, channels, 1, bias=False)  # while the image is still small
        self.block = Block(2 * channels, channels, **options)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(self.thin(x), size=skip.shape[-2:])  # odd or even
        return self.block(torch.cat([skip, x], dim=1))


def make_norm(norm: str, channels: int) -> nn.Module:
    """GroupNorm by default: it looks at one sample only, so splitting a batch over ranks changes nothing."""
    if norm == "group":
        groups = max(g for g in range(1, 9) if channels % g == 0)
        return nn.GroupNorm(groups, channels)
    return {"batch": nn.BatchNorm2d, "none": lambda _: nn.Identity()}[norm](channels)


class UNet(nn.Module):
    """(batch, inputs, y, x) → (batch, outputs, y, x), for any y and x of at least 2**depth.

    width          channels of the first level; level k has width · 2**k
    depth          how often the image is halved
    norm           "group", "batch" or "none"
    padding        "zeros", or "circular" for a planet without edges
    residual       add the input's first channels to the output: the net learns the change, and starts at "no change"
    checkpointing  recompute each block's activations in the backward pass instead of keeping them
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        width: int = 16,
        depth: int = 2,
        norm: str = "group",
        padding: str = "zeros",
        residual: bool = False,
        checkpointing: bool = False,
    ):
        super().__init__()
        if residual and inputs < outputs:
            raise ValueError(f"residual needs at least as many inputs as outputs, not {inputs} for {outputs}")
        self.outputs, self.residual, self.checkpointing = outputs, residual, checkpointing
        channels = [width * 2**level for level in range(depth + 1)]
        options = {"norm": norm, "padding": padding}
        self.down = nn.ModuleList(Block(a, b, **options) for a, b in zip([inputs, *channels], channels[:-1]))
        self.bottom = Block(channels[-2] if depth else inputs, channels[-1], **options)
        self.up = nn.ModuleList(Up(c, **options) for c in reversed(channels[:-1]))
        self.head = nn.Conv2d(width, outputs, 1)
        if residual:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if min(x.shape[-2:]) < 2 ** len(self.down):
            raise ValueError(f"an image of {tuple(x.shape[-2:])} can't be halved {len(self.down)} times")
        image, skips = x, []
        for block in self.down:
            x = self.run(block, x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.run(self.bottom, x)
        for up in self.up:
            x = self.run(up, x, skips.pop())
        x = self.head(x)
        return x + image[:, : self.outputs] if self.residual else x

    def run(self, part: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        if self.checkpointing and self.training:
            return checkpoint(part, *inputs, use_reentrant=False)
        return part(*inputs)


def _blocks(inputs: int, *, width: int, depth: int) -> list[tuple[int, int, int]]:
    """(inputs, outputs, level) of every block, in the order of the forward pass."""
    channels = [width * 2**level for level in range(depth + 1)]
    down = [(a, b, level) for level, (a, b) in enumerate(zip([inputs, *channels], channels))]
    return down + [(2 * channels[level], channels[level], level) for level in reversed(range(depth))]


def count_parameters(inputs: int, outputs: int, *, width: int, depth: int, norm: str = "group") -> int:
    """The number of parameters: 9·in·out for a 3×3 convolution, 2·out for its normalisation (or out for its bias).

    Going up, every level begins with a 1×1 convolution of 2c·c; the one at the end has (width + 1)·outputs.
    """
    extra = 1 if norm == "none" else 2
    blocks = _blocks(inputs, width=width, depth=depth)
    thin = sum(2 * c * c for c in (width * 2**level for level in range(depth)))
    return sum(9 * (a + b) * b + 2 * extra * b for a, b, _ in blocks) + thin + (width + 1) * outputs


def count_activations(
    inputs: int, *, size: tuple[int, int], width: int, depth: int, padding: str = "zeros", checkpointing: bool = False
) -> int:
    """Bytes a sample that the backward pass needs kept, for norm="group" without its few statistics.

    A block keeps what enters it, and for each convolution the result and the ReLU of its normalisation; circular padding keeps an
    enlarged copy of what each convolution reads; pooling keeps where each maximum was, in 8 bytes. With checkpointing
    only what enters a block and what leaves it is kept; what enters on the way up has left another one.
    """
    areas = [(size[0] >> level) * (size[1] >> level) for level in range(depth + 1)]
    padded = [((size[0] >> level) + 2) * ((size[1] >> level) + 2) for level in range(depth + 1)]
    blocks = _blocks(inputs, width=width, depth=depth)
    values = 0
    for number, (a, b, level) in enumerate(blocks):
        if checkpointing:
            values += ((a if number <= depth else 0) + b) * areas[level]
        else:
            values += a * areas[level] if padding == "zeros" else (a + b) * padded[level]
            values += 4 * b * areas[level]
    pooled = sum(width * 2**level * areas[level + 1] for level in range(depth))
    return 4 * values + 8 * pooled


def measure_activations(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd really keeps between forward and backward, parameters aside, each storage counted once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x)  # held until here: a freed storage's address may come back
    del output
    return sum(size for address, size in kept.items() if address not in parameters)
