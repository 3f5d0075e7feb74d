"""One of the ranks that benchmarks.parallel measures; it starts them so:

    torchrun --standalone --nproc-per-node 2 -m benchmarks.parallel_ranks bubble FILE --micro-batches 1,2,4,8
    torchrun --standalone --nproc-per-node 2 -m benchmarks.parallel_ranks pipelines FILE --strategies pipeline_naive,pipeline_1f1b
    torchrun --standalone --nproc-per-node 4 -m benchmarks.parallel_ranks memory FILE --strategies fsdp

FILE gets a list with what each rank has found. What is timed lives in the same processes and takes turns; a step begins and
ends with a barrier, so it takes as long as its slowest rank.
"""

import argparse
import ctypes
import functools
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.table import keep_memory, take_turns
from course_lib.config import Config
from course_lib.parallel import STRATEGIES
from course_lib.parallel.pipeline import GPipe, Tensor
from course_lib.parallel.shard import held, needed
from course_lib.parallel.split import split
from course_lib.parallel.staged import pipeline_step
from course_lib.timeline import Timeline, unrecorded
from course_lib.trainer import train_step
from course_lib.unet import UNet
from course_lib.world import World, barrier, start, stop

CHANNELS = 6


def make_model(options: argparse.Namespace) -> UNet:
    torch.manual_seed(0)
    return UNet(CHANNELS, CHANNELS, width=options.width, depth=options.depth, padding="circular")


def make_batch(options: argparse.Namespace, seed: int = 0) -> torch.Tensor:
    shape = (2, options.batch, CHANNELS, options.size, options.size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def timed(world: World, work: Callable) -> float:
    """Seconds until the last rank is done."""
    barrier(world)
    began = time.perf_counter()
    work()
    barrier(world)
    return time.perf_counter() - began


# ---- bubble ----------------------------------------------------------------------------------------------------------------


class Apart(GPipe):
    """A stage's work without a message: what would come from the others is made up. All ranks compute all the time."""

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> list[dist.Work]:
        return []

    def expect(self, expected: Sequence[Tensor], source: int) -> tuple[list[torch.Tensor], list[dist.Work]]:
        tensors = [one.make(self.device) for one in expected]
        for tensor in tensors:
            tensor.detach().normal_()
        return tensors, []


def measure_bubble(world: World, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Seconds a step, and of this rank in forward and in backward: the pipeline, and its stages apart."""
    model, (x, y) = make_model(options), make_batch(options)
    stages = split(model, world.world_size)

    def turn(pipe: GPipe, timeline: Timeline) -> dict[str, float]:
        seconds = 0.0
        for number in range(1 + options.steps):
            model.zero_grad()
            once = timed(world, lambda: pipe.step(x, y, F.mse_loss))
            if number == 0:  # it pays for what the turn before left in the caches
                timeline.spans.clear()
            else:
                seconds += once
        totals = {"step": seconds, "forward": timeline.total("forward"), "backward": timeline.total("backward")}
        timeline.spans.clear()
        return {name: total / options.steps for name, total in totals.items()}

    loops = {}
    for count in map(int, options.micro_batches.split(",")):
        for name, kind in (("pipeline", GPipe), ("apart", Apart)):
            timeline = Timeline()
            pipe = kind(stages, x, micro_batches=count, timeline=timeline)
            loops[f"{name} {count}"] = functools.partial(turn, pipe, timeline)
    return take_turns(loops, options.rounds)


# ---- pipelines -------------------------------------------------------------------------------------------------------------


def measure_pipelines(world: World, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a step of the trainer's pipelines, each with its own copy of the same model."""
    batch = make_batch(options)

    def make_step(name: str) -> Callable[[], torch.Tensor]:
        config = Config(strategy=name, batch=options.batch, micro_batches=int(options.micro_batches))
        model = make_model(options)
        wrapped, sync = STRATEGIES[name](model, world, config)
        optimizer = torch.optim.Adam(model.parameters())
        return lambda: pipeline_step(wrapped, batch, optimizer, sync, unrecorded, F.mse_loss)

    def turn(step: Callable) -> float:
        step()
        return sum(timed(world, step) for _ in range(options.steps)) / options.steps

    steps = {name: make_step(name) for name in options.strategies.split(",")}
    losses = [[float(step()) for _ in range(3)][-1] for step in steps.values()]
    assert max(losses) - min(losses) < 1e-3 * max(losses), f"the pipelines differ in their loss: {losses}"
    return take_turns({name: functools.partial(turn, step) for name, step in steps.items()}, options.rounds)


# ---- memory ----------------------------------------------------------------------------------------------------------------


def private_memory() -> int:
    """Bytes that this process has to itself (USS), without those that were freed and that glibc still keeps."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return psutil.Process().memory_full_info().uss


def peak_memory() -> int:
    """The most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def train(strategy: str, world: World, options: argparse.Namespace) -> tuple:
    """A model after some steps, its optimizer, and the bytes that a rank must keep of them by the formula."""
    model, batch = make_model(options), make_batch(options, seed=world.rank)
    formulas = {f"stage {stage}": sum(needed(model, world.world_size, stage=stage).values()) for stage in (0, 3)}
    wrapped, sync = STRATEGIES[strategy](model, world, Config())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(options.steps):
        train_step(wrapped, batch, optimizer, sync)
    return wrapped, optimizer, formulas


def measure_memory(world: World, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Bytes that this rank keeps: counted, by the formula, and as the process grows. Its peak is right for the first strategy."""
    found = {}
    for strategy in options.strategies.split(","):
        tiny = argparse.Namespace(**vars(options) | {"width": 2})
        train(strategy, world, tiny)  # what a first step loads and sets up is none of the model's
        before, resident = private_memory(), psutil.Process().memory_info().rss
        wrapped, optimizer, formulas = train(strategy, world, options)
        grown = {"private": private_memory() - before, "peak": peak_memory() - resident}
        found[strategy] = {"counted": sum(held(wrapped, optimizer).values()), **formulas, **grown}
    return found


PARTS = {"bubble": measure_bubble, "memory": measure_memory, "pipelines": measure_pipelines}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_ranks", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--strategies", help=f"of {', '.join(STRATEGIES)}, with commas between")
    parser.add_argument("--micro-batches", default="4", help="one number; for bubble several, with commas between")
    for flag, default in (("width", 16), ("depth", 2), ("size", 64), ("batch", 8), ("steps", 3), ("rounds", 9)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    options = parser.parse_args()
    world = start(Config(device="cpu", threads=1))
    if options.part != "memory":
        keep_memory()
    found = [None] * world.world_size
    dist.all_gather_object(found, PARTS[options.part](world, options))
    if world.is_main:
        options.file.write_text(json.dumps(found))
    stop(world)


if __name__ == "__main__":
    main()
