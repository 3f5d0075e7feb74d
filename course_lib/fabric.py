"""Our own loop on Lightning Fabric: Fabric starts the ranks, finds the device and wraps the model; the loop stays ours.

python -m course_lib.fabric --strategy ddp --devices 2      # alone: Fabric starts the other ranks itself
torchrun --standalone --nproc-per-node 2 -m course_lib.fabric --strategy ddp
srun python -m course_lib.fabric --strategy ddp             # in a Slurm job: Fabric reads rank and world size from SLURM_*

Strategies: single, dp (threads where there is no GPU), ddp.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from course_lib import places, trainer
from course_lib.config import Config, UserError, run_main
from course_lib.parallel import ddp, find_strategy
from course_lib.parallel.dp import DataParallel
from course_lib.train import main
from course_lib.trainer import Fitted
from course_lib.world import World, launch_name, stay_on_this_machine


def make_fabric(config: Config) -> Fabric:
    """A Fabric for this config."""
    where, timeout = places.settings(config), timedelta(seconds=config.timeout)
    if config.strategy == "dp" and where["accelerator"] == "gpu":
        where["devices"] = torch.cuda.device_count()  # one process drives them all
    ranks = 1 if config.strategy == "dp" else where["num_nodes"] * where["devices"]
    known = {
        "single": lambda: "auto",
        "dp": lambda: "dp" if where["accelerator"] == "gpu" else "auto",  # on CPUs Fabric would make DDP of it
        "ddp": lambda: DDPStrategy(timeout=timeout, **ddp.options(config)),
    }
    if config.strategy not in known:
        raise UserError(f"--strategy {config.strategy} is not one that Fabric has here; use {', '.join(known)}")
    find_strategy(config.strategy, World(world_size=ranks), config.task)  # or it says why not
    if where["num_nodes"] == 1:
        stay_on_this_machine()
    return Fabric(**where, strategy=known[config.strategy]() if where["devices"] * where["num_nodes"] > 1 else "auto")


def fit(config: Config, told: Callable[[], bool] | None = None) -> tuple[Fitted, World]:
    """Train as the config says. Also returns this process's place."""
    fabric = make_fabric(config)
    fabric.launch()
    torch.set_num_threads(config.threads)
    world = World(fabric.global_rank, fabric.local_rank, fabric.world_size, fabric.device, launch_name())

    def wrap(model: nn.Module, world: World, config: Config, timeline=None):
        threads = config.strategy == "dp" and world.device.type == "cpu"
        model = DataParallel(model, config.devices, timeline) if threads else model
        return fabric.setup_module(model), lambda: None

    return trainer.fit(config, world, told=told, strategy=wrap), world


if __name__ == "__main__":
    run_main(lambda: main(fit, "course_lib.fabric"))
