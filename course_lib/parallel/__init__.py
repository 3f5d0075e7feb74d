"""How ranks share the work. A strategy wraps the model from outside; the UNet knows nothing of it.

strategy(model, world, config, timeline) → (what to call in the forward pass, what to do between backward and step)
"""

from collections.abc import Callable

import torch
from torch import nn

from course_lib.config import Config, UserError
from course_lib.parallel import ddp, horovod, ring, shard, staged
from course_lib.parallel.dp import DataParallel
from course_lib.parallel.split import Split
from course_lib.world import World

Wrapped = tuple[nn.Module, Callable[[], None]]


def nothing() -> None:
    """Between backward and step there is nothing to do."""


def single(model: nn.Module, world: World, config: Config = Config(), timeline=None) -> Wrapped:
    """One rank, one model."""
    return model, nothing


def data_parallel(model: nn.Module, world: World, config: Config = Config(), timeline=None) -> Wrapped:
    """One rank, several devices: all GPUs of this node, or threads where there is none."""
    if world.device.type == "cuda":
        return nn.DataParallel(model), nothing
    return DataParallel(model, config.devices, timeline), nothing


def split_model(model: nn.Module, world: World, config: Config = Config(), timeline=None) -> Wrapped:
    """One rank, one model in --devices stages: on as many GPUs of this node, or all on the CPU where there is none."""
    if world.device.type == "cuda" and torch.cuda.device_count() < config.devices:
        raise UserError(f"--strategy split needs --devices {config.devices} GPUs: {torch.cuda.device_count()} are here")
    devices = [f"cuda:{n}" if world.device.type == "cuda" else "cpu" for n in range(config.devices)]
    return Split(model, devices, timeline=timeline), nothing


def tensor_parallel(model: nn.Module, world: World, config: Config = Config(), timeline=None) -> Wrapped:
    """Single layers over all ranks."""
    from course_lib.parallel import tensor  # DTensor takes a second to import

    return tensor.tensor_parallel(model, world, config, timeline)


ALONE = {"single": single, "dp": data_parallel, "split": split_model}
TOGETHER = {
    "ddp": ddp.ddp,
    "ddp_naive": ddp.naive,
    "ddp_bucketed": ddp.bucketed,
    "ddp_overlapped": ddp.overlapped,
}
BY_OTHERS = {  # data parallel as well, but torch sends nothing
    "mpi": ring.averaged_by(ring.mpi_all_reduce),
    "mpi_ring": ring.averaged_by(ring.all_reduce),
    "horovod": horovod.horovod,
}
SHARDED = {"fsdp": shard.fsdp, "hsdp": shard.hsdp}  # each rank sees its own samples, and has a part of every weight
SHARED = {  # ranks that share one model
    "pipeline_naive": staged.pipeline("naive"),
    "pipeline_gpipe": staged.pipeline("gpipe"),
    "pipeline_1f1b": staged.pipeline("1f1b"),
    "hybrid": staged.pipeline("naive"),
    "spatial": staged.spatial,
    "tp": tensor_parallel,
}
STRATEGIES = ALONE | TOGETHER | BY_OTHERS | SHARDED | SHARED
NOT_FOR = {"digits": {"split", *SHARDED, *SHARED}, "squad": {"split", *SHARED}}  # they cut the UNet, or need its blocks


def find_strategy(name: str, world: World, task: str = "forecast") -> Callable[..., Wrapped]:
    """The strategy of this name, if it fits the number of ranks and the task's net."""
    if name not in STRATEGIES:
        raise UserError(f"--strategy must be one of {', '.join(STRATEGIES)}, not {name!r}")
    if name in NOT_FOR.get(task, ()):
        fits = [other for other in STRATEGIES if other not in NOT_FOR[task]]
        raise UserError(f"--strategy {name} can't cut the net of --task {task}; use one of {', '.join(fits)}")
    if name in ALONE and world.world_size > 1:
        raise UserError(f"--strategy {name} is for one rank, and {world.world_size} were started; try --strategy ddp")
    return single if world.world_size == 1 and name not in ALONE else STRATEGIES[name]
