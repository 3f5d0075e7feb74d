"""Train the UNet: the one program behind every notebook, torchrun, mpirun and sbatch.

python -m course_lib.train --epochs 2
python -m course_lib.train --epochs 2 --resume
torchrun --standalone --nproc-per-node 2 -m course_lib.train --strategy ddp
mpirun -n 2 python -m mpi4py -m course_lib.train --launcher mpi --strategy ddp
"""

from course_lib.config import Config, run_main
from course_lib.trainer import fit
from course_lib.world import start, stop


def main() -> int:
    config = Config.parse()
    world = start(config)
    fitted = fit(config, world)
    if world.is_main:
        print(f"done: {fitted.run}  validation loss {fitted.metrics['loss']:.4f}")
    stop(world)
    return 0


if __name__ == "__main__":
    run_main(main)
