"""What this machine's messages and steps cost, measured on real ranks: the learner's own micro-benchmark.

torchrun --standalone --nproc-per-node 4 -m course_lib.probe --out probe.json --task segment --data data/cells

For every number of ranks up to the world's, the others idle: the time of an all-reduce by its size, and the time of a
training step by its batch, on so many ranks at once: each for itself, and together by DDP. scaling.py makes a model of the
first two, and predicts the third.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from course_lib.config import Config, Parser, UserError, run_main
from course_lib.data.tasks import make_task
from course_lib.machine import count_cores
from course_lib.parallel import ring
from course_lib.trainer import make_model, train_step
from course_lib.world import World, barrier, start, stop

SIZES = tuple(2**power for power in range(10, 25, 2))  # bytes: 1 KiB … 16 MiB
BATCHES = (2, 4, 8)
SECONDS = 0.02  # a measurement repeats what is shorter


@dataclass
class Measurement:
    """Work that a group of ranks does at the same time, and the seconds that it took on the slowest, again and again."""

    facts: dict
    ranks: int
    group: dist.ProcessGroup | None
    work: Callable[[], None]
    device: torch.device = torch.device("cpu")
    calls: int = 0
    seconds: list[float] = field(default_factory=list)

    def take(self) -> None:
        """Once more; what is short is done many times in a row. The first time only warms up."""
        if self.group:
            dist.barrier(self.group)
        began = self._now()
        for _ in range(self.calls or 2):
            self.work()
        seconds = self._slowest((self._now() - began) / (self.calls or 2))
        if self.calls:
            self.seconds.append(seconds)
        self.calls = self.calls or math.ceil(SECONDS / seconds)

    def _now(self) -> float:
        """The clock, when all is done: a GPU's work is only queued when the call returns."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _slowest(self, seconds: float) -> float:
        tensor = torch.tensor([seconds], dtype=torch.float64, device=self.device)  # NCCL knows only GPUs' memory
        if self.group:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group)
        return tensor.item()


def probe(config: Config, world: World, *, sizes=SIZES, batches=BATCHES, repeats: int = 7) -> dict:
    """Measure all-reduces and steps on 1, 2, …, all ranks, each once in every round: a slow minute hits all alike."""
    task = make_task(config, world)
    model = make_model(config, task).to(world.device).train()
    x, y = (torch.stack(part).to(world.device) for part in zip(*(task.train[i] for i in range(max(batches)))))
    groups = {n: dist.new_group(list(range(n))) if n > 1 else None for n in range(1, world.world_size + 1)}
    messages, steps, together = [], [], []
    for ranks, group in groups.items():
        wrapped = model
        if world.rank < ranks > 1:
            wrapped = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=config.bucket_mb)
        for size in sizes if group else ():
            send = partial(dist.all_reduce, torch.zeros(size // 4, device=world.device), group=group)
            messages.append(Measurement({"ranks": ranks, "bytes": size}, ranks, group, send, world.device))
        for net, kind in ((model, steps), (wrapped, together)):
            optimizer = torch.optim.Adam(net.parameters(), lr=0.0)
            for batch in batches:
                step = partial(train_step, net, (x[:batch], y[:batch]), optimizer, measure=task.score.loss)
                kind.append(Measurement({"ranks": ranks, "batch": batch}, ranks, group, step, world.device))
    for _ in range(repeats + 1):
        for measurement in messages + steps + together:
            barrier(world)  # who is not in the group waits at the next one, which takes no time from the others
            if world.rank < measurement.ranks:
                measurement.take()
    barrier(world)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found = {"messages": messages, "steps": steps, "together": together}
    rows = {kind: [m.facts | {"seconds": m.seconds} for m in several] for kind, several in found.items()}
    return rows | {"cores": max(1, int(count_cores())) if world.device.type == "cpu" else 0, "parameters": parameters}


def race(world: World, sizes: Sequence[int], *, repeats: int = 7) -> dict[str, list[dict]]:
    """The same all-reduce in three ways, in turns: our ring, MPI's own, gloo's. {way: rows like a probe's messages}."""
    from mpi4py import MPI

    ways = {
        "ring by hand": partial(ring.all_reduce, comm=MPI.COMM_WORLD),
        "MPI_Allreduce": partial(ring.mpi_all_reduce, comm=MPI.COMM_WORLD),
        "gloo": lambda array: dist.all_reduce(torch.from_numpy(array)),
    }
    rows = {name: [] for name in ways}
    for size in sizes:
        for name, way in ways.items():
            facts = {"ranks": world.world_size, "bytes": size}
            work = partial(way, np.zeros(size // 4, np.float32))
            rows[name].append(Measurement(facts, world.world_size, dist.group.WORLD, work))
    for _ in range(repeats + 1):
        for measurement in chain(*zip(*rows.values())):
            measurement.take()
    return {name: [m.facts | {"seconds": m.seconds} for m in several] for name, several in rows.items()}


def main() -> int:
    parser = Parser(prog="python -m course_lib.probe", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each (default: %(default)s)")
    options, rest = parser.parse_known_args()
    if options.repeats < 1:
        raise UserError(f"--repeats must be at least 1, not {options.repeats}")
    config = Config.parse(rest, prog=parser.prog)
    world = start(config)
    found = probe(config, world, repeats=options.repeats)
    if world.is_main:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found) + "\n")
        print(f"done: {options.out}")
    stop(world)
    return 0


if __name__ == "__main__":
    run_main(main)
