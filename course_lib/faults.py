"""Faults on purpose, for the labs in which things break: lines changed in a good program, or something done around it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from course_lib.config import Config
from course_lib.launch import find_ranks
from course_lib.metrics import read_log

ALL = "all"


class Fault(NamedTuple):
    """Something that goes wrong. {rank} and {port} in its lines are filled in when a case is made."""

    meaning: str
    shows: str  # where one sees it
    edits: tuple[tuple[str, str], ...] = ()  # (as it is in the good program, as it is in the bad one)
    around: str = ""  # what happens to the program while it runs: a name of lab_rank.AROUND
    rank: str | tuple = ALL  # where: ALL, "one" (another in every case), or any of these
    lines: tuple[str, ...] = ()  # pieces of the lines of the bad program that are a right answer
    remedy: str = ""  # a key of REMEDIES, where no line of the program can be mended
    no_cure: tuple[str, str] = ()  # a pattern of fixes with which it runs, and what is wrong with them all the same
    exact: bool = True  # mended, it gives the good program's numbers; else ranks finish alike and have shared the work


REMEDIES = {
    "restart": "start the ranks again from the last checkpoint (torchrun --max-restarts, Slurm's requeue)",
    "exclude": "take the slow node out of the job (sbatch --exclude) and report it",
    "closer": "bring the data closer: copy it to the node's own disk, or read ahead (Prefetcher)",
    "timeout": "a longer time-out of the process group",
    "rate": "a smaller learning rate, or a longer warm-up",
    "ranks": "fewer ranks",
}

BY_HAND = """def average_gradients() -> None:
    for parameter in model.parameters():
        with timeline.span("communicate"):
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


"""

FAULTS = {
    "rank-dependent seed": Fault(
        "every rank starts from weights of its own",
        "the weights at the start differ from rank to rank",
        edits=(("torch.manual_seed(0)", "torch.manual_seed(rank)"),),
        lines=("torch.manual_seed(rank)",),
    ),
    "missing set_epoch": Fault(
        "every epoch has the same order",
        "the samples of the steps repeat in the second epoch",
        edits=(("    sampler.set_epoch(epoch)\n", ""),),
        lines=("for epoch in", "model.train()", "in timeline.watch(DataLoader", "sampler = "),
    ),
    "wrong loss averaging": Fault(
        "a mean of the ranks' means, where ranks have unequal shares",
        "the validation loss is not that of all images, which can be computed from what each rank has",
        edits=(("torch.tensor([sum(errors), len(errors)])", "torch.tensor([sum(errors) / len(errors), 1])"),),
        lines=("sum(errors) / len(errors), 1",),
    ),
    "fixed port taken": Fault(
        "two jobs on one node, and both want the same port",
        "a rank fails to listen before the training begins",
        edits=(
            (
                'dist.init_process_group("gloo")',
                'dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)',
            ),
        ),
        rank=(0,),
        lines=("tcp://127.0.0.1",),
        no_cure=(r"tcp://\S*:\d*[1-9]", "it works today, and will break again in the same way"),
    ),
    "killed rank": Fault(
        "a rank is killed from outside",
        "a rank's output ends without a last word, and the others lose their connection to it",
        around="kill",
        rank="one",
        lines=("dist.all_reduce(parameter.grad)", "average_gradients()", "optimizer.step()"),
        remedy="restart",
    ),
    "mismatched collective": Fault(
        "one rank calls a collective that the others don't",
        "from some number on, the Flight Recorder has another collective on one rank than on the others",
        edits=(
            (
                '        note("step"',
                '        if rank == {rank}: dist.barrier()  # before the log is written\n        note("step"',
            ),
        ),
        rank="one",
        lines=("before the log is written",),
    ),
    "uneven shards": Fault(
        "one rank has more batches than the others",
        "one rank makes a step in which nobody joins it",
        edits=(
            ("sampler = DistributedSampler(train, drop_last=True)", "sampler = list(range(rank, len(train), ranks))"),
            ("sampler.set_epoch(epoch)", "np.random.default_rng(epoch).shuffle(sampler)"),
        ),
        rank=(0,),
        lines=("sampler = list",),
        exact=False,
    ),
    "forgotten barrier on save": Fault(
        "ranks read a checkpoint before it has been written",
        "all ranks but the one that writes can't find the file",
        edits=(("    dist.barrier()\n", ""),),
        around="slow save",
        rank=(0, 1, 2),
        lines=("torch.load(", "torch.save("),
    ),
    "straggler": Fault(
        "one rank computes more slowly than the others",
        "in the timeline one rank computes for long, and the others wait for it in every step",
        around="slow compute",
        rank="one",
        lines=("model(x), y)", "loss.backward()"),
        remedy="exclude",
    ),
    "slow storage": Fault(
        "reading a sample takes longer than learning from it",
        "in the timeline all ranks load for long in every step",
        around="slow reading",
        lines=("np.load(", "in timeline.watch(DataLoader"),
        remedy="closer",
    ),
    "BatchNorm": Fault(
        "every rank normalises by its own share of the batch, and its averages are of these",
        "the weights agree, but the buffers do not",
        edits=(
            ("nn.GroupNorm(2, 8)", "nn.BatchNorm2d(8)"),
            ("optimizer = torch", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = torch"),
            (BY_HAND, ""),  # DDP averages gradients
            ("        average_gradients()\n", ""),
            ("F.mse_loss(model(x[None])", "F.mse_loss(model.module(x[None])"),
        ),
        lines=("nn.BatchNorm2d(8)",),
        no_cure=(
            r"BatchNorm|broadcast|all_reduce|model\(x\[None",
            "the ranks agree then, but each still normalises by its own share of the batch while it learns",
        ),
        exact=False,
    ),
    "out of memory": Fault(
        "the batch does not fit into the memory",
        "the allocator says how much it was asked for",
        edits=(("epochs, batch = 2, 4", "epochs, batch = 2, 12"),),
        around="little memory",
        rank=(0, 1, 2, ALL),
        lines=("epochs, batch", "model(x), y)", "loss.backward()"),
        exact=False,
    ),
}


@contextmanager
def kill(rank: int, config: Config, *, step: int) -> Iterator[None]:
    """While the block trains as the config says: kill -9 this rank once, as soon as the log has reached this step."""
    began, over = time.time(), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            with suppress(FileNotFoundError):
                done = [
                    event for event in read_log(config.run) if event["time"] > began and event.get("step", 0) >= step
                ]
                process = find_ranks(f"--name={config.name}").get(rank) if done else None
                if process:
                    print(f"[kill -9] rank {rank}, process {process.pid}, after step {done[-1]['step']}", flush=True)
                    return os.kill(process.pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
