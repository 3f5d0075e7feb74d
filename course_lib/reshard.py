"""Four ranks save a training in parts; two read it and go on. Lesson 08 starts it twice:

    torchrun --standalone --nproc-per-node 4 -m course_lib.reshard FOLDER   # HSDP, 2 × 2: 5 steps, save, 5 more
    torchrun --standalone --nproc-per-node 2 -m course_lib.reshard FOLDER   # FSDP: load, the same 5

Each leaves the loss of its last step in FOLDER/loss-<ranks>.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib import sharded_checkpoint
from course_lib.checkpoint import State
from course_lib.config import Config, run_main
from course_lib.parallel.shard import fsdp, hsdp
from course_lib.unet import UNet
from course_lib.world import World, start, stop


def train(state: State, world: World, steps: int) -> float:
    """The same global batches on any number of ranks; returns the last one's loss."""
    for step in range(state.step, state.step + steps):
        x = torch.randn(8, 2, 16, 16, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(world.world_size)[world.rank].to(world.device)
        state.optimizer.zero_grad()
        loss = (state.model(mine) - mine[:, :1]).square().mean()
        loss.backward()
        state.optimizer.step()
        state.step += 1
    total = loss.detach().clone()
    dist.all_reduce(total)
    if world.is_main:
        print(f"step {state.step}: loss {total.item() / world.world_size:.6f}")
    return total.item() / world.world_size


def save_and_go_on(folder: Path, world: World) -> float:
    """A thread writes step 5 while all ranks train on."""
    model, _ = hsdp(UNet(2, 1, width=8).to(world.device), world, Config(devices=2))
    state = State(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    train(state, world, 5)
    writing = sharded_checkpoint.save_in_background(folder, state, dist.new_group(backend="gloo"))
    loss = train(state, world, 5)
    writing.result()
    return loss


def load_and_go_on(folder: Path, world: World) -> float:
    """From other weights, so that equal ones must have been loaded."""
    model, _ = fsdp(UNet(2, 1, width=8).to(world.device), world)
    state = State(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    found = sharded_checkpoint.load(folder, state)
    if world.is_main:
        print(f"loaded {found.name}: step {state.step}")
    return train(state, world, 5)


def main() -> int:
    world, folder = start(Config()), Path(sys.argv[1])
    torch.manual_seed(world.world_size)
    loss = (save_and_go_on if world.world_size == 4 else load_and_go_on)(folder, world)
    if world.is_main:
        (folder / f"loss-{world.world_size}").write_text(str(loss))
    stop(world)
    return 0


if __name__ == "__main__":
    run_main(main)
