"""The training loops of which benchmarks.ddp measures the fixed cost: the same steps, driven by ours and by its peers.

All drive the same model, from equal loaders over the same samples in memory. The clock sits in the model: it notes
the CPU time at the start of every forward pass, so whatever a loop does between two of them counts, on any thread of the process,
and how a loop is set up does not. Ours keeps its log and says its progress as in fit; the peers are as lean as they can
be set up: no logger, no bar, no checkpoints.
"""

import contextlib
import io
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.table import keep_memory, take_turns
from course_lib.checkpoint import State
from course_lib.config import Config
from course_lib.data.batches import Batches
from course_lib.data.tasks import Task
from course_lib.metrics import Log
from course_lib.progress import Progress
from course_lib.scores import SquaredError
from course_lib.trainer import train_epoch
from course_lib.unet import UNet
from course_lib.world import World

CHANNELS, BATCH, WARM = 6, 8, 5
BARE = "bare loop"
AGAIN = "bare loop again"  # how far two equal loops seem to differ: nothing smaller can be told
OURS = "course_lib.trainer.train_epoch"
AHEAD = "course_lib.trainer.train_epoch with its prefetching thread"


class Clock:
    """Notes the CPU seconds of this process whenever the model is called."""

    def __init__(self, model: nn.Module):
        self.marks: list[float] = []
        model.register_forward_pre_hook(lambda *_: self.marks.append(time.process_time()))

    def time(self, loop: Callable[[], None]) -> list[float]:
        """CPU seconds of every step after the first few."""
        self.marks.clear()
        loop()
        return [after - before for before, after in itertools.pairwise(self.marks[WARM:])]


def bare(model: nn.Module, loader: Iterable, optimizer=None, backward=torch.Tensor.backward) -> Callable[[], None]:
    optimizer = optimizer or torch.optim.Adam(model.parameters())

    def loop() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            backward(loss)
            optimizer.step()

    return loop


def ours(model: nn.Module, dataset: TensorDataset, steps: int, folder: Path, prefetch: int) -> Callable[[], None]:
    """train_epoch with what fit does around it at every step."""
    optimizer, world = torch.optim.Adam(model.parameters()), World()
    task = Task(dataset, dataset, CHANNELS, CHANNELS, SquaredError(), residual=True)
    config = Config(batch=BATCH, lr=1e-3, prefetch=prefetch)

    def loop() -> None:
        state = State(model, optimizer)
        with (
            contextlib.redirect_stdout(io.StringIO()),
            Log(folder / "metrics.jsonl", world) as log,
            Progress(steps) as progress,
        ):
            for value, timing in train_epoch(model, state, task, config=config, world=world, steps=steps):
                log.write("step", step=state.step, epoch=state.epoch, loss=value, **timing)
                progress.update(state.step, loss=value, samples_per_s=timing["samples_per_s"])

    return loop


def lightning_trainer(model: nn.Module, loader: DataLoader, folder: Path) -> tuple[str, Callable[[], None]]:
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            x, y = batch
            return F.mse_loss(self.model(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.model.parameters())

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    module = Module()

    def loop() -> None:
        plain = {
            "accelerator": "cpu",
            "devices": 1,
            "plugins": LightningEnvironment(),
        }  # it need not look for Slurm or MPI
        trainer = lightning.Trainer(**plain, **quiet, max_epochs=1, default_root_dir=folder)
        trainer.fit(module, loader)

    return f"Lightning {lightning.__version__} Trainer", loop


def fabric(model: nn.Module, loader: DataLoader, folder: Path) -> tuple[str, Callable[[], None]]:
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment

    runner = lightning.Fabric(accelerator="cpu", devices=1, plugins=LightningEnvironment())
    wrapped, optimizer = runner.setup(model, torch.optim.Adam(model.parameters()))
    loader = runner.setup_dataloaders(loader)
    return f"Lightning {lightning.__version__} Fabric", bare(wrapped, loader, optimizer, runner.backward)


def accelerate(model: nn.Module, loader: DataLoader, folder: Path) -> tuple[str, Callable[[], None]]:
    from accelerate import Accelerator, __version__

    runner = Accelerator(cpu=True)
    wrapped, optimizer, loader = runner.prepare(model, torch.optim.Adam(model.parameters()), loader)

    return f"Accelerate {__version__}", bare(wrapped, loader, optimizer, runner.backward)


PEERS = {lightning_trainer: "lightning", fabric: "lightning", accelerate: "accelerate"}


def cpu_seconds(folder: Path, *, steps: int, rounds: int, width: int, depth: int, size: int) -> dict[str, float]:
    """CPU seconds a step of every loop that is there.

    What is sought is a small part of a step, and far less than the same step may cost more on a busy machine, in CPU time too.
    So the loops take turns and the best round counts, for the first step, for the second, …: one in ten writes the log.
    """
    keep_memory()
    torch.manual_seed(0)
    model = UNet(CHANNELS, CHANNELS, width=width, depth=depth)
    clock, count = Clock(model), WARM + 1 + steps
    dataset = TensorDataset(*torch.randn(2, count * BATCH, CHANNELS, size, size))

    def loader() -> DataLoader:
        return DataLoader(dataset, batch_sampler=Batches(len(dataset), BATCH))

    loops = {BARE: bare(model, loader()), AGAIN: bare(model, loader())}
    loops |= {name: ours(model, dataset, count, folder, prefetch) for name, prefetch in ((OURS, 0), (AHEAD, 2))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no workers is on purpose
        for peer, package in PEERS.items():
            try:
                name, loop = peer(model, loader(), folder)
            except ImportError as error:
                print(f"{peer.__name__} is not installed: pip install {package} ({error})")
            else:
                loops[name] = loop
        turns = take_turns({name: lambda loop=loop: clock.time(loop) for name, loop in loops.items()}, rounds)
    return {name: statistics.fmean(map(min, zip(*found))) for name, found in turns.items()}
