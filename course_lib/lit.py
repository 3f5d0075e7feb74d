"""The same nets, data, log and checkpoint in Lightning: the loop is its Trainer's.

python -m course_lib.lit --strategy ddp --devices 2      # alone: Lightning starts the other ranks itself
torchrun --standalone --nproc-per-node 2 -m course_lib.lit --strategy ddp
srun python -m course_lib.lit --strategy ddp             # in a Slurm job: Lightning reads rank and world size from SLURM_*

Strategies: single, ddp, fsdp. --resume goes on from runs/<name>/lightning/last.ckpt.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader

from course_lib import places
from course_lib.callbacks import Records, SlurmInfo, Stopped, Told, world_of
from course_lib.checkpoint import launch_of
from course_lib.config import Config, UserError, run_main
from course_lib.data.batches import Batches, shard
from course_lib.data.tasks import make_task
from course_lib.metrics import sum_over_ranks
from course_lib.parallel import ddp, find_strategy
from course_lib.parallel.shard import shard as shard_model
from course_lib.precautions import set_aside, share_batch
from course_lib.progress import has_bar
from course_lib.train import main
from course_lib.trainer import Fitted, learning_rate, make_model
from course_lib.world import World, stay_on_this_machine


class LitModel(lightning.LightningModule):
    """What is ours: the net, the loss of a batch, the score of an epoch, the optimizer. All else is the Trainer's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.metrics: dict = {}

    def configure_model(self) -> None:
        """On every rank, before the optimizer is made: here a net may be cut into shards."""
        if hasattr(self, "model"):  # Lightning may call this more than once
            return
        task = self.trainer.datamodule.task
        self.model, self.score = make_model(self.config, task), task.score
        if self.config.strategy == "fsdp" and self.trainer.world_size > 1:
            shard_model(self.model, self.device_mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: tuple, number: int) -> torch.Tensor:
        x, y = batch
        loss = self.score.loss(self(x), y)
        self.log("loss", loss)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.total = 0
        ddp.broadcast(self.model.buffers(), world_of(self.trainer))  # BatchNorm's averages differ from rank to rank

    def validation_step(self, batch: tuple, number: int) -> None:
        x, y = batch
        prediction = self(x)
        if number < self.trainer.datamodule.own_batches:
            self.total = self.total + self.score.sums(prediction, y)

    def on_validation_epoch_end(self) -> None:
        sums = sum_over_ranks(self.total, world_of(self.trainer))  # never means of means
        self.metrics = self.score.result(sums.tolist())
        scores = {name: value for name, value in self.metrics.items() if isinstance(value, float)}
        self.log_dict({f"valid_{name}": value for name, value in scores.items()})

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["random"] = torch.get_rng_state()  # which Lightning leaves out

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        torch.set_rng_state(checkpoint["random"])

    def configure_optimizers(self) -> dict:
        config, steps = self.config, self.trainer.datamodule.steps
        peak = config.lr * self.trainer.world_size if config.scale_lr else config.lr
        adam = torch.optim.Adam(
            self.parameters(), lr=1.0
        )  # times the schedule's value: the rate itself, to the last bit
        schedule = torch.optim.lr_scheduler.LambdaLR(
            adam, lambda step: learning_rate(step, peak=peak, warmup=config.warmup, steps=steps)
        )
        return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LitData(lightning.LightningDataModule):
    """Which rank sees which sample when: our own batches, so that a run can be compared with our trainer's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config

    def prepare_data(self) -> None:
        """On one rank of each node, while the others wait: what passes over the files once."""
        make_task(self.config)

    def setup(self, stage: str) -> None:
        """On every rank."""
        self.task, self.world = make_task(self.config), world_of(self.trainer)
        whole = Batches(len(self.task.train), self.config.batch, world=self.world)
        self.mine = shard(len(self.task.valid), self.config.batch, self.world)
        self.own_batches, self.epoch_batches = len(self.mine), len(whole)
        self.epoch_steps = math.ceil(len(whole) / self.trainer.accumulate_grad_batches)
        self.steps = min(self.config.epochs * self.epoch_steps, self.config.max_steps or math.inf)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, its steps that are done) after so many steps; after the very last one the epoch stays what it was."""
        over = step == self.steps
        epoch, done = divmod(step - over, self.epoch_steps)
        return epoch, done + over

    def train_dataloader(self) -> DataLoader:
        """One epoch's; the Trainer asks for a new one in every epoch."""
        config, epoch, each = self.config, self.trainer.current_epoch, self.trainer.accumulate_grad_batches
        done = (self.trainer.global_step - epoch * self.epoch_steps) * each  # of this epoch, where a run is resumed
        last = min(self.epoch_batches, (self.steps - epoch * self.epoch_steps) * each)
        seen = done * config.batch * self.world.world_size
        batches = Batches(
            len(self.task.train), config.batch, seed=config.seed, epoch=epoch, seen=seen, world=self.world
        )
        return self._loader(self.task.train, Rest(batches, done, last))

    def val_dataloader(self) -> DataLoader:
        """Every sample once over all ranks. Shards may be uneven, but all must call the model equally often: some again."""
        calls = math.ceil(len(self.task.valid) / self.world.world_size / self.config.batch)
        again = self.mine[:1] * (calls - len(self.mine))
        return self._loader(self.task.valid, self.mine + again)

    def _loader(self, dataset, batches) -> DataLoader:
        generator = torch.Generator()  # of its own: the model's random state is none of the loader's business
        return DataLoader(dataset, batch_sampler=batches, num_workers=self.config.workers, generator=generator)


class Rest:
    """What is left of an epoch. It is as long as the whole epoch: the Trainer counts on from where it was."""

    def __init__(self, batches: Batches, done: int, last: int):
        self.batches, self.done, self.last = batches, done, last

    def __len__(self) -> int:
        return self.last

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batches, self.last - self.done)


def strategies(config: Config, ranks: int) -> dict:
    """Our names for a strategy, and what Lightning calls it."""
    timeout = timedelta(seconds=config.timeout)
    return {
        "single": lambda: "auto",
        "ddp": lambda: DDPStrategy(timeout=timeout, **ddp.options(config)),
        "fsdp": lambda: ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=False, timeout=timeout),
    }


def make_trainer(config: Config, *, callbacks: Sequence = (), told: Callable | None = None, **options):
    """A Trainer for this config, with our log and checkpoint beside its own; options are Lightning's, and count first."""
    where = places.settings(config)
    ranks = where["num_nodes"] * where["devices"]
    known = strategies(config, ranks)
    if config.strategy not in known:
        raise UserError(f"--strategy {config.strategy} is not one that Lightning has here; use {', '.join(known)}")
    find_strategy(config.strategy, World(world_size=ranks), config.task)  # or it says why not
    if where["num_nodes"] == 1:
        stay_on_this_machine()
    folder = config.run / "lightning"
    best = ModelCheckpoint(folder, "best", monitor="valid_loss", enable_version_counter=False)
    settings = {
        "strategy": known[config.strategy]() if ranks > 1 else "auto",
        "max_epochs": config.epochs,
        "max_steps": config.max_steps or -1,
        "reload_dataloaders_every_n_epochs": 1,  # each has an order of its own
        "use_distributed_sampler": False,  # LitData's batches know the ranks
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "logger": [TensorBoardLogger(folder, "", "tensorboard", default_hp_metric=False), CSVLogger(folder, "", "csv")],
        "log_every_n_steps": config.log_every,
        "enable_progress_bar": has_bar(),
        "enable_model_summary": False,
    }
    callbacks = [*callbacks, LearningRateMonitor("step"), SlurmInfo(), best, Records(config), Told(config, told)]
    return lightning.Trainer(**where | settings | options, callbacks=callbacks)


def fit(config: Config, *, told: Callable[[], bool] | None = None, **options) -> tuple[Fitted, World]:
    """Train as the config says, with Lightning's loop in place of ours. Also returns this process's place."""
    torch.set_num_threads(config.threads)
    where = places.settings(config)
    config = share_batch(config, World(world_size=where["num_nodes"] * where["devices"]))
    trainer = make_trainer(config, told=told, **options)
    world, last = world_of(trainer), config.run / "lightning" / "last.ckpt"
    again = config.resume or (world.launch and launch_of(config.run / "checkpoint.pt") == world.launch)
    if again and not last.exists():
        raise UserError(f"{last} is not there: nothing to resume; leave out --resume to start anew")
    if not again and world.is_main:
        set_aside(config.run, world.launch)
    lit, metrics = LitModel(config), {}
    with suppress(Stopped):
        trainer.fit(lit, LitData(config), ckpt_path=last if again else None)
        metrics = lit.metrics
    return Fitted(lit.model, metrics, config.run), world_of(trainer)


if __name__ == "__main__":
    run_main(lambda: main(fit, "course_lib.lit"))
