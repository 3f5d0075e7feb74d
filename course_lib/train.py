"""Train the UNet: the one program behind every notebook, torchrun, mpirun and sbatch.

python -m course_lib.train --epochs 2
python -m course_lib.train --epochs 2 --resume
torchrun --standalone --nproc-per-node 2 -m course_lib.train --strategy ddp
mpirun -n 2 python -m mpi4py -m course_lib.train --launcher mpi --strategy ddp

A rank that gets SIGUSR1 makes all of them save and stop, with exit code 75: try again later, with --resume.
"""

import signal
from collections.abc import Callable

from course_lib.config import Config, run_main
from course_lib.trainer import Fitted, fit
from course_lib.world import World, start, stop

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: not done, and nothing wrong either


def train(config: Config, told: Callable[[], bool]) -> tuple[Fitted, World]:
    """With our own loop."""
    world = start(config)
    return fit(config, world, told=told), world


def main(train: Callable[..., tuple[Fitted, World]] = train, prog: str = "course_lib.train") -> int:
    """Parse, train by whichever loop, say how it ended; that of Lightning and Fabric as well."""
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
    fitted, world = train(Config.parse(prog=f"python -m {prog}"), told=lambda: bool(signals))
    if world.is_main and fitted.metrics:
        print(f"done: {fitted.run}  validation loss {fitted.metrics['loss']:.4f}")
    elif world.is_main:
        print(f"told to stop, and saved: {fitted.run}  --resume goes on")
    stop(world)
    return 0 if fitted.metrics else STOPPED


if __name__ == "__main__":
    run_main(main)
