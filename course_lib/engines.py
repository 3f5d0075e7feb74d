"""How ipyparallel shall start a notebook's ranks: by our guard, with our Python and our MPI, here or as a Slurm job."""

import os
import shlex
import shutil
import socket
import sys
from pathlib import Path

from jupyter_core.paths import jupyter_runtime_dir
from traitlets.config import Config as Settings

from course_lib.config import UserError
from course_lib.launch import GUARD, ONE_THREAD
from course_lib.ports import PORTS

SLURM_JOB = """#!/bin/bash
#SBATCH --job-name=ranks --output={{output_file}} --ntasks={{n}} {options}
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE COURSE_PLAIN=1
exec srun --mpi=pmi2 --kill-on-bad-exit=1 {program} --mpi
"""


# Each rank's shell tells how it ended before mpiexec or srun can know, who then end the others too.
TELLS = ["sh", "-c", '"$@"; code=$?; echo "rank $PMI_RANK ended: $code" >&2; exit $code', "-"]
ALONE = {"UCX_NET_DEVICES": "lo"}  # the MPI of ranks on one machine listens to nobody else's


def local_settings(claim: socket.socket) -> Settings:
    """Ranks on this machine, by mpiexec."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        raise UserError(f"{mpiexec} is missing: `make setup` brings it, or `pip install mpich` in this environment")
    settings = Settings()
    settings.Cluster.engine_launcher_class = "mpi"
    settings.ControllerLauncher.controller_cmd = [*GUARD, sys.executable, "-m", "ipyparallel.controller"]
    first = claim.getsockname()[1]
    ports = f"--IPController.ports={first + 1}-{first + PORTS.step - 1}"
    settings.ControllerLauncher.controller_args = [ports, "--HeartMonitor.period=1000"]  # 10 beats missed: dead
    settings.EngineLauncher.engine_cmd = [*TELLS, sys.executable, "-m", "ipyparallel.engine"]
    settings.EngineLauncher.engine_args = ["--IPEngine.max_heartbeat_misses=20"]  # of the controller: then they end
    settings.EngineLauncher.environment = ONE_THREAD | ALONE | {"COURSE_PLAIN": "1"}  # nobody sees an engine's bars
    settings.MPIEngineSetLauncher.mpi_cmd = [*GUARD, str(mpiexec)]
    return settings


def nodes_here() -> int:
    """On how many nodes this notebook may start ranks without asking for a job: on those of the job that it runs in."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if shutil.which("srun") else 1


def step_settings(claim: socket.socket, nodes: int) -> Settings:
    """The same on several nodes of the job that this notebook runs in: mpiexec's part is srun's."""
    settings = _on_nodes(local_settings(claim))
    place = [f"--jobid={os.environ['SLURM_JOB_ID']}", f"--nodes={nodes}", "--overlap", "--overcommit", "--mem=0"]
    settings.MPIEngineSetLauncher.mpi_cmd = [*GUARD, "srun", *place, "--mpi=pmi2", "--kill-on-bad-exit=1"]
    return settings


def _on_nodes(settings: Settings) -> Settings:
    """Controller and MPI are reached from other machines."""
    settings.Cluster.controller_ip = "*"
    own = settings.EngineLauncher.environment
    settings.EngineLauncher.environment = {name: value for name, value in own.items() if name not in ALONE}
    return settings


def slurm_settings(claim: socket.socket, options: str) -> Settings:
    """The same as one Slurm job."""
    if not shutil.which("sbatch"):
        raise UserError(
            "sbatch is missing: ranks on Slurm nodes need Slurm; leave out slurm= for ranks on this machine"
        )
    settings = _on_nodes(local_settings(claim))
    settings.Cluster.engine_launcher_class = "slurm"
    launcher, program = settings.SlurmEngineSetLauncher, shlex.join(settings.EngineLauncher.engine_cmd)
    private = Path(jupyter_runtime_dir())  # not /tmp, where others could have put a file of that name
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    launcher.batch_template = SLURM_JOB.format(options=options, program=program)
    launcher.batch_file_name = str(private / f"ranks-{os.getpid()}.sbatch")
    launcher.submit_command, launcher.delete_command = [*GUARD, "sbatch"], [*GUARD, "scancel"]
    return settings
