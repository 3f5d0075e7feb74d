"""What our trainer does around its loop, as callbacks of Lightning's: log, checkpoint, timing, Slurm's facts, a clean stop."""

import os
import time
from collections.abc import Callable

import torch
from lightning.pytorch.callbacks import Callback

from course_lib.checkpoint import State
from course_lib.config import Config
from course_lib.metrics import Log, count_nodes, max_rss_mb, process_times, sum_over_ranks
from course_lib.precautions import require_finite
from course_lib.progress import Progress, has_bar
from course_lib.world import World, launch_name


def world_of(trainer) -> World:
    """This process's place, as Lightning knows it."""
    places = (trainer.global_rank, trainer.local_rank, trainer.world_size, trainer.strategy.root_device)
    return World(*places, launch=launch_name())


class Records(Callback):
    """runs/<name>/metrics.jsonl and checkpoint.pt, as our trainer writes them: every plot, table and job reads on."""

    def __init__(self, config: Config):
        self.config = config

    def on_train_start(self, trainer, lit) -> None:
        world, steps = world_of(trainer), trainer.datamodule.steps
        self.log = Log(self.config.run / "metrics.jsonl", world)
        self.progress = Progress(steps, done=trainer.global_step, quiet=has_bar() or not world.is_main)
        count = sum(parameter.numel() for parameter in lit.model.parameters())
        facts = {"device": str(world.device), "parameters": count, "torch": torch.__version__}
        facts |= {"world_size": world.world_size, "nodes": count_nodes(world), "launch": world.launch}
        self.log.write("start", config=vars(self.config), step=trainer.global_step, steps=steps, **facts)
        self.began = self.marked = self.left = time.perf_counter()
        self.marked_step, self.waited = trainer.global_step, 0.0

    def on_train_batch_start(self, trainer, lit, batch, number: int) -> None:
        self.waited += time.perf_counter() - self.left

    def on_train_batch_end(self, trainer, lit, outputs, batch, number: int) -> None:
        step = trainer.global_step
        due = step % self.config.log_every == 0 or step == trainer.datamodule.steps
        if due and step > self.marked_step:
            loss, now = float(outputs["loss"]) * trainer.accumulate_grad_batches, time.perf_counter()
            require_finite(loss, step)
            samples = self.config.batch * trainer.world_size * trainer.accumulate_grad_batches
            speed = (step - self.marked_step) * samples / (now - self.marked)
            facts = {"lr": self.rate, "samples_per_s": speed, "wait_share": self.waited / (now - self.marked)}
            self.log.write("step", step=step, epoch=trainer.current_epoch, loss=loss, **facts)
            self.progress.update(step, loss=loss, samples_per_s=speed)
            lit.log("samples_per_s", speed)
            self.marked, self.marked_step, self.waited = time.perf_counter(), step, 0.0
        if self.config.checkpoint_every and step % self.config.checkpoint_every == 0:
            self.save(trainer, lit)
        self.left = time.perf_counter()

    def on_before_optimizer_step(self, trainer, lit, optimizer) -> None:
        self.rate = optimizer.param_groups[0]["lr"]

    def on_validation_end(self, trainer, lit) -> None:
        epoch, _ = trainer.datamodule.position(trainer.global_step)
        require_finite(lit.metrics["loss"], trainer.global_step)
        self.log.write("eval", step=trainer.global_step, epoch=epoch, **lit.metrics)
        self.progress.note(f"step {trainer.global_step}  validation loss {lit.metrics['loss']:.4f}")
        self.save(trainer, lit)
        self.marked = self.left = time.perf_counter()

    def save(self, trainer, lit) -> None:
        """Lightning's checkpoint for --resume here, and ours: `python -m course_lib.train --resume` can go on from it."""
        trainer.save_checkpoint(self.config.run / "lightning" / "last.ckpt")
        epoch, done = trainer.datamodule.position(trainer.global_step)
        world = world_of(trainer)
        seen = done * self.config.batch * world.world_size * trainer.accumulate_grad_batches
        state = State(lit.model, trainer.optimizers[0], trainer.global_step, epoch, seen, world.launch)
        state.save(self.config.run / "checkpoint.pt", self.config, write=world.is_main)

    def on_train_end(self, trainer, lit) -> None:
        world = world_of(trainer)
        facts = {"seconds": time.perf_counter() - self.began, "max_rss_mb": max_rss_mb(world)} | process_times(world)
        self.log.write("end", step=trainer.global_step, **facts)

    def teardown(self, trainer, lit, stage: str) -> None:
        if hasattr(self, "log"):
            self.log.__exit__()


class SlurmInfo(Callback):
    """Which job, on which nodes: beside the curves in TensorBoard, where somebody will ask for it a month later."""

    def on_fit_start(self, trainer, lit) -> None:
        names = ("JOB_ID", "JOB_NAME", "JOB_PARTITION", "NODELIST", "NTASKS", "RESTART_COUNT")
        facts = {f"slurm_{n.lower()}": os.environ[f"SLURM_{n}"] for n in names if f"SLURM_{n}" in os.environ}
        for logger in trainer.loggers:
            logger.log_hyperparams(vars(lit.config) | facts)


class Stopped(Exception):
    """The run was told to stop, and has saved."""


class Told(Callback):
    """As soon as any rank was told to stop, all save and stop at the same step.

    Lightning has a handler for that as well, which saves in the middle of whatever the rank is doing; ranks that are not at the
    same place then wait for each other's collectives. So we ask at the end of a step.
    """

    def __init__(self, config: Config, told: Callable[[], bool] | None):
        self.config, self.told = config, told

    def on_train_batch_end(self, trainer, lit, outputs, batch, number: int) -> None:
        over = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch  # an epoch's: evaluate first, stop a step later
        if self.told is None or over or trainer.global_step % self.config.log_every:
            return
        if sum_over_ranks(torch.tensor([float(self.told())]), world_of(trainer)).any():
            records = next(one for one in trainer.callbacks if isinstance(one, Records))
            records.save(trainer, lit)
            records.log.write("stop", step=trainer.global_step)
            raise Stopped
