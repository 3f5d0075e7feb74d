"""Horovod: the same averaging of gradients, but it is the optimizer that is wrapped, not the model.

Optional: `make horovod` builds it. Under mpirun its ranks meet in MPI's world; under any other launcher rank 0 opens the small
server that `horovodrun` would have opened.
"""

import json
import os
import socket
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from course_lib.config import Config, UserError
from course_lib.world import World


class Horovod(nn.Module):
    """The model as it is; `wrap_optimizer` does the rest."""

    def __init__(self, model: nn.Module, world: World, config: Config):
        super().__init__()
        self.module = model
        join(world, config.launcher)

    def forward(self, *inputs):
        return self.module(*inputs)


def wrap_optimizer(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Under Horovod: all ranks begin with rank 0's weights, and `step` first waits for the mean of all gradients."""
    if not isinstance(wrapped, Horovod):
        return optimizer
    if optimizer.state:
        raise ValueError(
            "Horovod makes a new optimizer, without the state of this one: wrap it first, then load the state"
        )
    import horovod.torch as hvd

    hvd.broadcast_parameters(wrapped.module.state_dict(), root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=wrapped.module.named_parameters())


def horovod(model: nn.Module, world: World, config: Config = Config(), timeline=None):
    """Horovod's DistributedOptimizer: gradients leave one by one as backward computes them, and are fused on the way."""
    return Horovod(model, world, config), lambda: None


def join(world: World, launcher: str) -> None:
    """hvd.init(), and the certainty that all ranks are in it."""
    if not find_spec("horovod"):
        raise UserError("--strategy horovod: Horovod is not installed; `make horovod` builds it, in about five minutes")
    import horovod.torch as hvd

    if launcher != "mpi" and not hvd.is_initialized():
        os.environ.update(meeting_place(world))
    hvd.init()
    if hvd.size() != world.world_size or hvd.rank() != world.rank:
        raise UserError(
            f"rank {world.rank} of {world.world_size} is {hvd.rank()} of {hvd.size()} for Horovod: start the ranks with "
            "mpirun and --launcher mpi, or with torchrun"
        )


def meeting_place(world: World) -> dict[str, str]:
    """What `horovodrun` tells each rank: its place, and where the server is at which all find each other."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    names: list[str] = [""] * world.world_size
    dist.all_gather_object(names, socket.gethostname())
    hosts = [HostInfo(name, names.count(name)) for name in dict.fromkeys(names)]
    places = get_host_assignments(hosts, world.world_size)
    told = [None]
    if world.rank == 0:
        server = RendezvousServer()
        told = [server.start()]
        server.init(places)
    dist.broadcast_object_list(told, src=0)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")  # where torch's gloo is told which to take, Horovod's takes it too
    return create_slot_env_vars(places[world.rank]) | {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": socket.gethostbyname(os.environ["MASTER_ADDR"]),  # rank 0 is there
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(told[0]),
        **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
    }


def count_messages(timeline: Path) -> tuple[int, int]:
    """From the file that HOROVOD_TIMELINE names: gradients that were averaged, and the all-reduces that it took."""
    text = timeline.read_text().rstrip().rstrip(",")  # the list may have been left open
    gradients, messages, under_way = 0, 0, set()
    for event in json.loads(text if text.endswith("]") else f"{text}]"):
        if event["ph"] == "B" and event["name"] in ("MPI_ALLREDUCE", "GLOO_ALLREDUCE"):
            gradients += 1
            messages += not under_way  # what shares a message begins before any ends
            under_way.add(event["pid"])
        elif event["ph"] == "E":
            under_way.discard(event["pid"])
    return gradients, messages
