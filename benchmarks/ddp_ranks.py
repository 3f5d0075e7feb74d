"""One of the ranks that benchmarks.ddp compares; it starts them so:

    torchrun --standalone --nproc-per-node 2 -m benchmarks.ddp_ranks FILE --loops ddp,ddp_overlapped,apart,alone
    mpirun -n 2 python -m mpi4py -m benchmarks.ddp_ranks FILE --loops ddp,horovod --launcher mpi

All ways of training live in the same processes and take turns, each with its own copy of the same model. A turn begins and
ends with a barrier, so it takes as long as its slowest rank. FILE gets {loop: [seconds a step, one number a round]}.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.table import keep_memory, take_turns
from course_lib.config import Config
from course_lib.parallel import BY_OTHERS, TOGETHER, single
from course_lib.parallel.horovod import wrap_optimizer
from course_lib.trainer import train_step
from course_lib.unet import UNet
from course_lib.world import World, barrier, start, stop

CHANNELS, BATCH = 6, 8  # a rank's batch: more ranks, more samples
APART = "apart"  # all ranks at the same time, without a word to each other
IN_STEP = "in_step"  # the same, but they wait for each other after every backward: what no communication could avoid
ALONE = "alone"  # rank 0 computes, the others wait
EQUAL = TOGETHER | BY_OTHERS


def make_loop(name: str, world: World, options: argparse.Namespace) -> tuple[Callable[[], float], float]:
    """A function that makes some steps and tells the seconds of one; and the loss after the first few, to be compared."""
    torch.manual_seed(0)
    model = UNet(CHANNELS, CHANNELS, width=options.width, depth=options.depth, padding="circular", residual=True)
    strategy = EQUAL.get(name, single)
    wrapped, sync = strategy(model, world, Config(bucket_mb=options.bucket_mb, launcher=options.launcher))
    if name == IN_STEP:
        sync = functools.partial(barrier, world)
    optimizer = wrap_optimizer(wrapped, torch.optim.Adam(model.parameters()))
    batch = torch.randn(
        2, BATCH, CHANNELS, options.size, options.size, generator=torch.Generator().manual_seed(world.rank)
    )
    takes_part = name != ALONE or world.is_main

    def train(steps: int) -> torch.Tensor | None:
        loss = None
        for _ in range(steps if takes_part else 0):
            loss = train_step(wrapped, batch, optimizer, sync)
        return loss

    def seconds_a_step() -> float:
        train(1)  # or the first step would pay for what the loop before left in the caches
        barrier(world)
        began = time.perf_counter()
        train(options.steps)
        barrier(world)
        return (time.perf_counter() - began) / options.steps

    return seconds_a_step, float(train(3)) if name in EQUAL else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp_ranks", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--loops", required=True, help=f"of {', '.join([*EQUAL, APART, IN_STEP, ALONE])}, with commas between"
    )
    for flag, default in (("width", 16), ("depth", 2), ("size", 64), ("steps", 8), ("rounds", 9)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--launcher", default="env")
    options = parser.parse_args()
    world = start(Config(device="cpu", threads=1, launcher=options.launcher))
    keep_memory()
    made = {name: make_loop(name, world, options) for name in options.loops.split(",")}
    losses = torch.tensor([loss for name, (_, loss) in made.items() if name in EQUAL])
    assert torch.allclose(losses, losses[0], rtol=1e-3), f"the ways of training differ in their loss: {losses.tolist()}"
    seconds = take_turns({name: loop for name, (loop, _) in made.items()}, options.rounds)
    if world.is_main:
        options.file.write_text(json.dumps(seconds))
    del made  # the models go before the group does
    stop(world)


if __name__ == "__main__":
    main()
