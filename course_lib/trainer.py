"""The training loop, to be read from top to bottom: train_step, evaluate, fit."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from course_lib.checkpoint import State, launch_of
from course_lib.config import Config
from course_lib.data.batches import Batches, shard
from course_lib.data.tasks import Task, make_task
from course_lib.metrics import Log, count_nodes, max_rss_mb, process_times, sum_over_ranks
from course_lib.parallel import find_strategy, nothing
from course_lib.parallel.ddp import broadcast
from course_lib.parallel.horovod import wrap_optimizer
from course_lib.parallel.staged import Pipeline, pipeline_step, world_of_data
from course_lib.precautions import require_all_batches, require_finite, set_aside, share_batch
from course_lib.prefetch import Prefetcher, apply_to_tensors
from course_lib.progress import Progress
from course_lib.rnn import RowReader
from course_lib.scores import SquaredError
from course_lib.timeline import Timeline, unrecorded
from course_lib.unet import UNet
from course_lib.world import World, start


def train_step(
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    optimizer,
    sync: Callable = nothing,
    span=unrecorded,
    measure: Callable = F.mse_loss,
) -> torch.Tensor:
    """One step: forward, backward, gradients in agreement, update. Returns the loss without waiting for the device."""
    x, y = batch  # (batch, channel, y, x)
    optimizer.zero_grad()
    with span("forward"):
        loss = measure(model(x), y)
    with span("backward"):
        loss.backward()
    with span("sync"):
        sync()
    with span("update"):
        optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(
    model: Callable, batches, world: World = World(), *, score=SquaredError(), shared: int = 1, calls: int = 0
) -> dict:
    """A task's loss and score over all samples of all ranks: sums and counts, never means of means.

    shared: how many ranks have the same samples, because they share a model.
    calls:  how often every rank must call the model; where weights are sharded, the others wait for it.
    """
    total, called = 0, 0
    for x, y in batches:
        total, called = total + score.sums(model(x), y), called + 1
    for _ in range(called, calls):
        model(x)
    return score.result(sum_over_ranks(total / shared, world).tolist())


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Rises in a line for `warmup` steps, then falls along half a cosine to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def make_model(config: Config, task: Task) -> nn.Module:
    """The net of a config, with the same weights on every rank: the UNet, or that of a case study."""
    torch.manual_seed(config.seed)
    if config.task == "digits":
        return RowReader(task.inputs, task.outputs, width=config.width, depth=config.depth)
    if config.task == "squad":
        from course_lib.bert import Reader  # transformers take seconds to import

        return Reader(config.pretrained, fresh=config.fresh)
    return UNet(
        task.inputs,
        task.outputs,
        width=config.width,
        depth=config.depth,
        norm=config.norm,
        padding=config.padding,
        residual=task.residual,
        checkpointing=config.checkpointing,
    )


def make_loader(config: Config, dataset, batches, world: World):
    """Batches on their device: read by a thread that runs ahead, by worker processes, or in the loop itself."""
    generator = torch.Generator()  # of its own: the checkpoint's random state is for the model, not for the loader
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=config.workers, generator=generator)
    if config.prefetch:
        return Prefetcher(loader, world.device, depth=config.prefetch)
    return (apply_to_tensors(batch, lambda tensor: tensor.to(world.device)) for batch in loader)


@dataclass(frozen=True)
class Fitted:
    """What a run leaves: the trained model, its last evaluation and its folder with the log and the checkpoint."""

    model: nn.Module
    metrics: dict  # empty if the run was told to stop
    run: Path


def fit(
    config: Config,
    world: World | None = None,
    *,
    told: Callable[[], bool] | None = None,
    strategy: Callable | None = None,
) -> Fitted:
    """Train as the config says, on this rank of the world; without one, in this process alone.

    As soon as `told` is true on any rank, all save and stop: at the next line of the log, where they ask each other.
    A strategy may be given; else it is the one that the config names.
    """
    world = world or start(config)
    strategy = strategy or find_strategy(config.strategy, world, config.task)
    data = world_of_data(config, world)  # ranks that share a model see the same samples
    config = share_batch(config, data)
    task = make_task(config, world)
    whole = Batches(len(task.train), config.batch, world=data)
    held_out = shard(len(task.valid), config.batch, data)  # now: too few samples is no news for the end of an epoch
    model = make_model(config, task).to(world.device)
    timeline = Timeline() if config.timeline else None
    wrapped, sync = strategy(model, world, config, timeline)
    several = False if config.strategy == "tp" else None  # weights at once on a GPU: not if some are DTensors, some not
    optimizer = torch.optim.Adam(model.parameters(), foreach=several)
    state = State(model, wrap_optimizer(wrapped, optimizer), launch=world.launch)
    saved = config.run / "checkpoint.pt"
    if config.resume or (world.launch and launch_of(saved) == world.launch):  # restarted by the launcher
        state.load(saved, config)
        if isinstance(wrapped, Pipeline):
            wrapped.let_go(state.optimizer)
    elif world.is_main:
        set_aside(config.run, world.launch)

    def save() -> None:
        if isinstance(wrapped, Pipeline):
            wrapped.bring_together(state.optimizer)
        state.save(saved, config, write=world.is_main)
        if isinstance(wrapped, Pipeline):
            wrapped.let_go(state.optimizer)

    steps = min(config.epochs * len(whole), config.max_steps or config.epochs * len(whole))

    with (
        Log(config.run / "metrics.jsonl", world) as log,
        Progress(steps, done=state.step, quiet=not world.is_main) as progress,
    ):
        count = sum(parameter.numel() for parameter in model.parameters())
        facts = {"device": str(world.device), "parameters": count, "torch": torch.__version__}
        facts |= {"world_size": world.world_size, "nodes": count_nodes(world), "launch": world.launch}
        log.write("start", config=vars(config), step=state.step, steps=steps, **facts)
        began = time.perf_counter()
        while True:
            for value, timing in train_epoch(
                wrapped, state, task, config=config, world=data, steps=steps, sync=sync, timeline=timeline, save=save
            ):
                log.write("step", step=state.step, epoch=state.epoch, loss=value, **timing)
                progress.update(state.step, loss=value, samples_per_s=timing["samples_per_s"])
                if told and sum_over_ranks(torch.tensor([float(told())]), world).any():
                    save()
                    log.write("stop", step=state.step)
                    return Fitted(model, {}, config.run)
            loader = make_loader(config, task.valid, held_out, world)
            broadcast(model.buffers(), world)  # BatchNorm's averages differ from rank to rank
            shared = world.world_size // data.world_size
            calls = math.ceil(len(task.valid) / data.world_size / config.batch)  # of the rank with the most samples
            metrics = evaluate(wrapped.eval(), loader, world, score=task.score, shared=shared, calls=calls)
            require_finite(metrics["loss"], state.step)  # before the last good checkpoint is replaced
            log.write("eval", step=state.step, epoch=state.epoch, **metrics)
            progress.note(f"step {state.step}  validation loss {metrics['loss']:.4f}")
            save()
            if state.step >= steps:
                if timeline:
                    timeline.save(config.run / f"timeline.{world.rank}.json")
                memory = max_rss_mb(world)
                seconds = time.perf_counter() - began
                log.write("end", step=state.step, seconds=seconds, max_rss_mb=memory, **process_times(world))
                return Fitted(model, metrics, config.run)


def train_epoch(
    model: nn.Module,
    state: State,
    task: Task,
    *,
    config: Config,
    world: World,
    steps: int,
    sync: Callable = nothing,
    timeline: Timeline | None = None,
    save: Callable = nothing,
):
    """Train to the end of the epoch, or to `steps`. Yields (loss, timing) whenever the log is due."""
    model.train()
    peak = config.lr * world.world_size if config.scale_lr else config.lr
    span = timeline.span if timeline else unrecorded
    take_step = pipeline_step if isinstance(model, Pipeline) else train_step
    batches = Batches(len(task.train), config.batch, seed=config.seed, epoch=state.epoch, seen=state.seen, world=world)
    marked, marked_step, waited = time.perf_counter(), state.step, 0.0
    with contextlib.closing(iter(make_loader(config, task.train, batches, world))) as loader:  # also when a step fails
        while state.step < steps:
            asked = time.perf_counter()
            with span("load"):
                batch = next(loader, None)
            waited += time.perf_counter() - asked
            if batch is None:
                require_all_batches(batches, state, world)
                state.epoch, state.seen = state.epoch + 1, 0
                break
            rate = learning_rate(state.step, peak=peak, warmup=config.warmup, steps=steps)
            for group in state.optimizer.param_groups:
                group["lr"] = rate
            loss = take_step(model, batch, state.optimizer, sync, span, task.score.loss)
            state.step, state.seen = state.step + 1, state.seen + batches.global_batch
            if timeline and state.step >= config.timeline:
                timeline.recording = False
            if state.step % config.log_every == 0 or state.step == steps:
                value, now = float(loss), time.perf_counter()
                require_finite(value, state.step)
                speed = (state.step - marked_step) * batches.global_batch / (now - marked)
                yield value, {"lr": rate, "samples_per_s": speed, "wait_share": waited / (now - marked)}
                marked, marked_step, waited = time.perf_counter(), state.step, 0.0
            if config.checkpoint_every and state.step % config.checkpoint_every == 0:
                save()
