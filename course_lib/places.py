"""How Lightning and Fabric are told where they are: who has started this process, how many ranks there are, on which device."""

import logging
import os
import warnings

import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from course_lib.config import Config, UserError


def settings(config: Config) -> dict:
    """Nodes, ranks on each and device, as Trainer and Fabric both take them.

    Lightning finds most of it by itself. Three things it gets wrong: a notebook that is itself a Slurm job is no rank of
    one; a job that names its launch as torchrun does (slurm/site.sh) was not started by torchrun; and its own way of stopping
    before a time limit saves in the middle of a step.
    """
    quiet()
    if "RANK" in os.environ:
        here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ["WORLD_SIZE"]
        nodes, here, environment = int(os.environ["WORLD_SIZE"]) // int(here), int(here), TorchElasticEnvironment()
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        if "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise UserError("Lightning wants to know how many ranks a node has: give sbatch --ntasks-per-node=…")
        nodes, here = int(os.environ["SLURM_STEP_NUM_NODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
        environment = SLURMEnvironment(auto_requeue=False)
    else:  # nobody: Lightning itself will start the others
        nodes, here, environment = (
            1,
            config.devices if config.strategy not in ("single", "dp") else 1,
            LightningEnvironment(),
        )
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return {"num_nodes": nodes, "devices": here, "plugins": [environment], "accelerator": "gpu" if on_gpu else "cpu"}


def quiet() -> None:
    """Without its tips and its greeting; warnings that matter stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "The `srun` command is available",
        ".*does not have many workers",
        ".*isinstance.treespec, LeafSpec",
    ):
        warnings.filterwarnings("ignore", message=message)
    for message in (".*exists and is not empty", ".*your dataloader is not resumable"):  # LitData's is, in its own way
        warnings.filterwarnings("ignore", message=message)
