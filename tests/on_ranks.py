"""What every rank does in test_ddp.py, and what one process does to compare with: the functions take either's world.

torchrun --standalone --nproc-per-node 2 tests/on_ranks.py PART FOLDER [FLAGS OF course_lib.train]   → FOLDER/<rank>.pt
"""

import contextlib
import copy
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import train, trainer
from course_lib.config import Config, UserError, run_main
from course_lib.parallel import TOGETHER, find_strategy
from course_lib.trainer import fit
from course_lib.unet import UNet
from course_lib.world import World, barrier, start, stop

SAMPLES, STEPS = 12, 3  # a step of all ranks together; shared by 1, 2 and 4 ranks, each with 3 pieces or 1


# ---- gradients and weights -------------------------------------------------------------------------------------------------


def my_part(step: int, world: World) -> list[torch.Tensor]:
    """This rank's part of a step's global batch. Only the first three samples, all of them rank 0's, begin above 0."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(SAMPLES, channels, 9, 7, generator=generator, dtype=torch.float64) for channels in (3, 2))
    x[:, 0, 0, 0] = torch.where(torch.arange(SAMPLES) < SAMPLES // 4, 1.0, -1.0)
    return [tensor.tensor_split(world.world_size)[world.rank] for tensor in (x, y)]


def make_net(world: World, **options) -> UNet:
    """Every rank begins with other weights, and with other averages in its BatchNorms."""
    torch.manual_seed(world.rank)
    net = UNet(3, 2, width=4, depth=2, padding="circular", **options).double()
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            buffer.fill_(world.rank + 1)
    return net


def make_frozen(world: World) -> UNet:
    net = make_net(world)
    net.down[0].requires_grad_(False)
    return net


class Choosy(nn.Module):
    """One layer for all samples, one for those that begin above 0, which one rank alone has, and one for nobody."""

    def __init__(self, world: World):
        super().__init__()
        torch.manual_seed(world.rank)
        self.never, self.sometimes = (nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64) for _ in range(2))
        self.always = nn.Conv2d(3, 2, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0, 0, 0] > 0
        return self.always(x + chosen[:, None, None, None] * self.sometimes(x) if chosen.any() else x)


class Mixed(nn.Module):
    """float32, then float64, then float32."""

    def __init__(self, world: World):
        super().__init__()
        torch.manual_seed(world.rank)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x.float()).double()).float()).double()


def wrap(model: nn.Module, world: World, strategy: str, bucket_mb: float) -> tuple[nn.Module, Callable[[], None]]:
    if strategy == "ddp" and world.world_size > 1 and isinstance(model, Choosy):  # torch's own must be told
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), lambda: None
    return find_strategy(strategy, world)(model, world, Config(bucket_mb=bucket_mb))


def learn(model: nn.Module, world: World, strategy: str, *, bucket_mb: float = 25.0, pieces: int = 1) -> dict:
    """Some steps of Adam; all gradients on the way, with the weights before and after."""
    wrapped, sync = wrap(model, world, strategy, bucket_mb)
    started, gradients = copy.deepcopy(dict(model.state_dict())), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        *first, last = zip(*(tensor.chunk(pieces) for tensor in my_part(step, world)))
        with getattr(wrapped, "no_sync", contextlib.nullcontext)():
            for x, y in first:
                (F.mse_loss(wrapped(x), y) / pieces).backward()
        (F.mse_loss(wrapped(last[0]), last[1]) / pieces).backward()
        sync()
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return {"started": started, "gradients": gradients, "weights": dict(model.state_dict())}


CASES: dict[str, Callable[[World, str], dict]] = {
    "one bucket": lambda world, strategy: learn(make_net(world), world, strategy),
    "some buckets": lambda world, strategy: learn(make_net(world), world, strategy, bucket_mb=0.01),
    "a bucket a parameter": lambda world, strategy: learn(make_net(world), world, strategy, bucket_mb=0),
    "accumulated": lambda world, strategy: learn(make_net(world), world, strategy, bucket_mb=0.01, pieces=3),
    "checkpointing": lambda world, strategy: learn(
        make_net(world, checkpointing=True), world, strategy, bucket_mb=0.01
    ),
    "frozen": lambda world, strategy: learn(make_frozen(world), world, strategy, bucket_mb=0.01),
    "unused": lambda world, strategy: learn(Choosy(world), world, strategy),
    "mixed": lambda world, strategy: learn(Mixed(world), world, strategy),
    "batch norm": lambda world, strategy: learn(make_net(world, norm="batch"), world, strategy),
}


def learn_all(world: World) -> dict:
    return {strategy: {case: run(world, strategy) for case, run in CASES.items()} for strategy in TOGETHER}


def backward_twice(world: World) -> str:
    """What the overlapped one says to a second backward without no_sync, once all is well again."""
    wrapped, sync = wrap(make_net(world), world, "ddp_overlapped", 0.01)
    x, y = my_part(0, world)
    for attempt in range(2):
        try:
            F.mse_loss(wrapped(x), y).backward()
        except RuntimeError as error:
            assert attempt == 1
            sync()
            return str(error)
    return ""


# ---- whole runs ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def spied_buffers() -> Iterator[dict]:
    """BatchNorm's averages on this rank at the end of an epoch, and when it evaluates."""
    share, evaluate, seen = trainer.broadcast, trainer.evaluate, {"trained": [], "evaluated": []}

    def spy_share(buffers, world):
        buffers = list(buffers)
        seen["trained"].append(copy.deepcopy(buffers))
        share(iter(buffers), world)

    def spy_evaluate(model, *rest, **options):
        seen["evaluated"].append(copy.deepcopy(list(model.buffers())))
        return evaluate(model, *rest, **options)

    trainer.broadcast, trainer.evaluate = spy_share, spy_evaluate
    try:
        yield seen
    finally:
        trainer.broadcast, trainer.evaluate = share, evaluate


def fit_all(config: Config, world: World) -> dict:
    """Several runs, one after the other; they leave their folders. Returns what BatchNorm's averages were."""
    fit(config.replace(name="shared", strategy="ddp", batch=1, global_batch=8), world)
    fit(config.replace(name="scaled", strategy="ddp", scale_lr=True), world)
    seen = {}
    for strategy in TOGETHER:
        with spied_buffers() as seen[strategy]:
            fit(config.replace(name=f"batch-norm-{strategy}", strategy=strategy, norm="batch"), world)
    return seen


MISTAKES = {
    "--strategy=dp": "--strategy dp is for one rank, and 2 were started; try --strategy ddp",
    "--global-batch=5": "--global-batch 5 can't be shared evenly by 2 ranks; try 4",
    "--global-batch=1": "--global-batch 1 can't be shared evenly by 2 ranks; try 2",
    "--batch=26": "--batch 26 on 2 ranks needs 52 samples a step, and there are only 50; use a smaller --batch, ",
    "--lead=29 --train-years=1980 --batch=1": "--batch 1 on 2 ranks needs 2 samples a step, and there are only 1; use a ",
    "--lead=29 --batch=1": "1 validation samples can't occupy 2 ranks; hold out more years",
    "--bucket-mb=-1": "--bucket-mb must be from 0 to 1e6, not -1.0",
    "--bucket-mb=nan": "--bucket-mb must be from 0 to 1e6, not nan",
    "--bucket-mb=inf": "--bucket-mb must be from 0 to 1e6, not inf",
    "--bucket-mb=x": "argument --bucket-mb: invalid float value: 'x'; python -m course_lib.train --help lists the flags",
}


def make_mistakes(config: Config, world: World) -> dict[str, str]:
    """What this rank says to each command line that is wrong; run_main would end it."""
    said, train.stop = {}, lambda world: None  # the next one needs the group too
    for words in MISTAKES:
        sys.argv = ["train", *config.replace(strategy="ddp").arguments(), *words.split()]
        try:
            train.main()
        except UserError as error:
            said[words] = str(error)
        barrier(world)
    return said


# ---- one rank fails --------------------------------------------------------------------------------------------------------


def end_early() -> None:
    """This rank's loader has three batches and no more."""
    real = trainer.make_loader

    def make_loader(*args):
        yield from itertools.islice(real(*args), 3)

    trainer.make_loader = make_loader


def trip() -> None:
    """This rank fails in its fourth step."""
    real, calls = trainer.train_step, itertools.count(1)

    def train_step(*args):
        if next(calls) == 4:
            raise ZeroDivisionError("rank 1 trips")
        return real(*args)

    trainer.train_step = train_step


def main() -> int:
    part, folder, *flags = sys.argv[1:]
    config = Config.parse(flags)
    if part in ("early", "trips"):
        if os.environ["RANK"] == "1":
            {"early": end_early, "trips": trip}[part]()
        sys.argv = ["train", *flags]
        return train.main()
    world = start(config)
    if part == "alone":
        found = [str(fit(config.replace(name=f"alone-{name}", strategy=name), world).run) for name in TOGETHER]
    else:
        found = learn_all(world) | {"twice": backward_twice(world)}
    if part == "all":
        found |= {"averages": fit_all(config, world), "mistakes": make_mistakes(config, world)}
    torch.save(found, Path(folder) / f"{world.rank}.pt")
    stop(world)
    return 0


if __name__ == "__main__":
    run_main(main)
