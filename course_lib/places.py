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
    known = os.environ
    if "RANK" in known:
        here = int(known.get("LOCAL_WORLD_SIZE") or known.get("SLURM_NTASKS_PER_NODE") or known["WORLD_SIZE"])
        nodes, environment = int(known["WORLD_SIZE"]) // here, TorchElasticEnvironment()
    elif int(known.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        if "SLURM_NTASKS_PER_NODE" not in known:
            raise UserError("Lightning wants to know how many ranks a node has: give sbatch --ntasks-per-node=…")
        here, nodes = int(known["SLURM_NTASKS_PER_NODE"]), int(known["SLURM_STEP_NUM_NODES"])
        environment = SLURMEnvironment(auto_requeue=False)
    else:  # nobody has: Lightning itself will start the others
        here, nodes = 1 if config.strategy in ("single", "dp") else config.devices, 1
        environment = LightningEnvironment()
    gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return {"num_nodes": nodes, "devices": here, "plugins": [environment], "accelerator": "gpu" if gpu else "cpu"}


def quiet() -> None:
    """Without its tips and its greeting; warnings that matter stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "The `srun` command is available",
        ".*does not have many workers",
        ".*isinstance.treespec, LeafSpec",
        ".*exists and is not empty",
        ".*your dataloader is not resumable",  # LitData's is, in a way of its own
        ".*sync_dist=True",  # what LitModel logs is the same on all ranks already
    ):
        warnings.filterwarnings("ignore", message=message)
