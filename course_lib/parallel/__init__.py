"""How ranks share the work. A strategy wraps the model from outside; the UNet knows nothing of it.

strategy(model, world) → (what to call in the forward pass, what to do between backward and step)
"""

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.config import UserError
from course_lib.world import World

Wrapped = tuple[nn.Module, Callable[[], None]]


def nothing() -> None:
    """Between backward and step there is nothing to do."""


def single(model: nn.Module, world: World) -> Wrapped:
    """One rank, one model."""
    if world.world_size > 1:
        raise UserError(f"--strategy single is for one rank, and {world.world_size} were started; try --strategy ddp")
    return model, nothing


def ddp(model: nn.Module, world: World) -> Wrapped:
    """PyTorch's own: gradients are averaged in buckets while the backward pass is still running."""
    if world.world_size == 1:
        return model, nothing
    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices), nothing


STRATEGIES = {"single": single, "ddp": ddp}
