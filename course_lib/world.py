"""Which rank am I, of how many, on which device: the only file that touches process groups.

Launchers differ, the dialect inside is one: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Alone, there is no group.
TORCHELASTIC_RUN_ID names the launch: torchrun restarts dead ranks, and Slurm a whole job, under the same name as before.
"""

import gc
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.config import Config, UserError


@dataclass(frozen=True)
class World:
    """This process's place. The default is a world of one on the CPU."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launch: str = ""

    @property
    def is_main(self) -> bool:
        """Rank 0 prints, logs and saves."""
        return self.rank == 0


def start(config: Config) -> World:
    """Find this process's place and join the others, if there are any."""
    torch.set_num_threads(config.threads)  # explicit: the default takes every core, and ranks would fight over them
    store = None
    if config.launcher == "mpi":
        rank, local_rank, world_size, store = _ask_mpi()
    else:
        rank, local_rank, world_size = _ask_environment()
        store = _store_of_this_start(world_size)
    device = _pick_device(config.device, local_rank)
    if world_size > 1 and not dist.is_initialized():  # a cell that joins the ranks may be run again
        if (store.host if config.launcher == "mpi" else os.environ["MASTER_ADDR"]) in ("localhost", "127.0.0.1"):
            stay_on_this_machine()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=config.timeout),
        )
    return World(rank, local_rank, world_size, device, launch_name())


def meet_by_file(path: Path, rank: int, world_size: int) -> None:
    """Join the ranks of this machine at a file, without a port and without a launcher.

    Of torch 2.13's TCPStore some client in every fifty waits five seconds for its first answer; ranks that live for a tenth of a
    second would notice.
    """
    if world_size > 1:
        stay_on_this_machine()
        store = dist.FileStore(str(path), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))


def launch_name() -> str:
    """What the launcher calls this launch, if it has a name: the same when ranks or a job are started again."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else name  # torchrun's word for no name


def stop(world: World) -> None:
    """Leave the group. The wrapped model must be gone by now: gloo aborts at exit when a DDP object outlives its group."""
    if world.world_size > 1:
        gc.collect()
        barrier(world)
        dist.destroy_process_group()


def barrier(world: World) -> None:
    """Wait for all ranks."""
    if world.world_size > 1:
        dist.barrier(device_ids=[world.device.index] if world.device.type == "cuda" else None)


def _ask_environment() -> tuple[int, int, int]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    alone = {"RANK", "WORLD_SIZE"} <= set(
        missing
    )  # an address by itself is a leftover: Lightning leaves one in a notebook
    if alone and _launched() > 1:
        raise UserError(
            f"{_launched()} processes were launched, but none was told its rank: put slurm/rank_env.sh between srun and "
            "python, or use --launcher mpi with mpirun"
        )
    if alone or os.environ.get("WORLD_SIZE") == "1":
        return 0, int(os.environ.get("LOCAL_RANK", "0")), 1
    if missing:
        raise UserError(f"{' and '.join(missing)} must be set beside the rest; start the ranks with torchrun")
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return rank, int(os.environ.get("LOCAL_RANK", rank)), world_size
    except ValueError as error:
        raise UserError(f"RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers ({error}); use torchrun") from error


def _launched() -> int:
    """How many processes the launcher has started, whichever it is: mpirun's word counts inside of a Slurm step."""
    names = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "SLURM_STEP_NUM_TASKS")
    return next((int(os.environ[name]) for name in names if name in os.environ), 1)


def _store_of_this_start(world_size: int) -> dist.Store | None:
    """After a restart by torchrun the new ranks must not find the addresses of the dead ones, which its store still has.

    torch 2.13 keeps one store for all restarts (https://github.com/pytorch/pytorch/issues/167288), so they use a part of it.
    Over several nodes the counts of restarts may differ; there slurm/site.sh makes torchrun take a new store each time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ["GROUP_WORLD_SIZE"] != "1":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, world_size, is_master=False)
    return dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _ask_mpi() -> tuple[int, int, int, dist.Store | None]:
    """Rank and size from the communicator; rank 0 listens on a free port and tells the others."""
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    if _launched() != everyone.size:
        raise UserError(
            f"{_launched()} processes were launched, but each is alone in a world of {everyone.size}: the launcher belongs to "
            "another MPI than mpi4py does; use the mpirun beside this python, or srun --mpi=pmi2"
        )
    here = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    if everyone.size == 1 or dist.is_initialized():  # nobody to meet, or met already
        return everyone.rank, here.rank, everyone.size, None
    host = "127.0.0.1" if here.size == everyone.size else everyone.bcast(socket.getfqdn())
    store = dist.TCPStore(host, 0, everyone.size, True, wait_for_workers=False) if everyone.rank == 0 else None
    port = everyone.bcast(store.port if store else None)
    store = store or dist.TCPStore(host, port, everyone.size, False)
    return everyone.rank, here.rank, everyone.size, store


def _pick_device(name: str, local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if name == "cuda" and not count:
        raise UserError("--device cuda, but torch sees no GPU here; use --device auto or cpu")
    if name == "cpu" or not count:
        return torch.device("cpu")
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU of its own: {count} here; start fewer ranks or --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def stay_on_this_machine() -> None:
    """gloo looks its own host name up, which fails on laptops and containers: on one machine use the loopback."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
