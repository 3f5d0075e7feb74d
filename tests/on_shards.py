"""What ranks do in test_shard.py: train sharded, and compare with a whole model beside it; save on four, go on with two.

torchrun --standalone --nproc-per-node 3 tests/on_shards.py equal | save FOLDER | load FOLDER
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode

from course_lib import sharded_checkpoint, simulate
from course_lib.checkpoint import State, whole
from course_lib.config import Config, run_main
from course_lib.parallel.shard import ShardedAdam, blocks, fsdp, held, hsdp, local, make_mesh, needed, shard
from course_lib.parallel.tensor import tensor_parallel
from course_lib.trainer import train_step
from course_lib.unet import UNet
from course_lib.world import World, start, stop

BATCH, STEPS = 12, 4  # over all ranks


def make(norm: str = "group", width: int = 6) -> UNet:
    torch.manual_seed(0)
    return UNet(3, 2, width=width, depth=2, norm=norm).double()


def batch_of(step: int, world: World = World()) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, c, 17, 20, dtype=torch.float64, generator=generator) for c in (3, 2))
    return x.chunk(world.world_size)[world.rank], y.chunk(world.world_size)[world.rank]


def train(model: nn.Module, optimizer, world: World = World(), first: int = 0) -> nn.Module:
    for step in range(first, first + STEPS):
        train_step(model, batch_of(step, world), optimizer)
    return model


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def compare(name: str, model: nn.Module, reference: nn.Module, world: World) -> None:
    for (key, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            whole(mine), theirs, rtol=1e-9, atol=1e-9, msg=lambda m, key=key: f"{name} {key} {m}"
        )
    tell(f"{name}: equal", world)


def tell(line: str, world: World) -> None:
    if world.is_main:
        print(f"<{line}>", flush=True)


def equal(world: World) -> None:
    n = world.world_size
    reference = make()
    train(reference, adam(reference))
    for stage in (1, 2):
        net = make()
        optimizer = ShardedAdam(net, world, stage=stage)
        compare(f"stage {stage}", train(net, optimizer, world), reference, world)
        near(held(net, optimizer.adam), needed(net, n, stage=stage))
    for name, strategy in {"fsdp": fsdp, "hsdp": hsdp}.items():
        if name == "fsdp" or n == 4:
            net, _ = strategy(make(), world)
            compare(name, train(net, adam(net), world), reference, world)
    for norm in ("group", "none") if n != 3 else ("none",):  # eight groups of channels are not for three
        net, reference = make(norm), make(norm)
        train(reference, adam(reference))
        net, _ = tensor_parallel(net, world)
        compare(f"tp, {norm}", train(net, adam(net)), reference, world)
        mine, all_of_it = (sum(local(p).numel() for p in one.bottom.parameters()) for one in (net, reference))
        assert 1 <= mine * n / all_of_it < 1.1  # the second normalisation is small, and whole on every rank
    count(world)


def near(found: dict[str, int], predicted: dict[str, int]) -> None:
    """Over all ranks never less than the formula; more only by what is filled up."""
    total = torch.tensor(list(found.values()))
    dist.all_reduce(total)
    for (name, size), mean in zip(predicted.items(), (total / dist.get_world_size()).tolist()):
        assert size - 1 < mean < 1.05 * size, (name, mean, size)


def count(world: World) -> None:
    """On real ranks FSDP sends what the formula says, in as many messages as torch's own counter sees."""
    n, x = world.world_size, batch_of(0, world)[0]
    width = 2 * n  # every number of channels but the outputs' is a multiple of the ranks
    net, _ = fsdp(make("none", width), world)
    optimizer = adam(net)
    train_step(net, (x, net(x).detach() + 1), optimizer)
    near(held(net, optimizer), needed(make("none", width), n, stage=3))
    with simulate.Traffic() as traffic:
        net(x).sum().backward()
    assert traffic.sent == simulate.fsdp_bytes(make("none", width), n)
    expected = {"all-gather": 2 * len(blocks(net)) + 1, "reduce-scatter": len(blocks(net)) + 1}
    assert traffic.calls == expected, traffic.calls
    if n == 4:
        groups, _ = hsdp(make("none", width), world, Config(devices=2))
        with simulate.Traffic() as hsdp_traffic:
            groups(x).sum().backward()
        assert hsdp_traffic.sent == simulate.hsdp_bytes(make("none", width), 4, inside=2)
    counted, _ = fsdp(without_inplace(make("none", width)), world)
    with warnings.catch_warnings(action="ignore"), CommDebugMode() as counter:
        counted(x).sum().backward()
    assert sum(expected.values()) == counter.get_total_counts()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    lean = shard(make("none", width).float(), make_mesh("cpu", n), mp_policy=half)
    assert {p.dtype for p in lean.parameters()} == {torch.float32}
    with simulate.Traffic() as lean_traffic:
        output = lean(x.float())
    gathered = sum(m.bytes for m in lean_traffic.messages)
    assert output.dtype == torch.bfloat16
    assert gathered == sum(m.bytes for m in traffic.messages[: len(lean_traffic.messages)]) / 4  # 2 bytes for 8
    tell("bytes and messages: as the formulas say", world)


def without_inplace(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # the counter's own hooks do not bear it
    return model


def save(world: World, folder: Path) -> None:
    """A copy is written in the background while training goes on; whole checkpoints beside it, to compare with."""
    net, _ = fsdp(make(), world)
    state = State(net, adam(net))
    train(net, state.optimizer, world)
    state.step = STEPS
    state.save(folder / "then.pt", Config(), write=world.is_main)
    writing = sharded_checkpoint.save_in_background(folder, state, dist.new_group(backend="gloo"))
    train(net, state.optimizer, world, first=STEPS)
    writing.result()
    state.save(folder / "after.pt", Config(), write=world.is_main)


def load(world: World, folder: Path) -> None:
    net, _ = fsdp(make("group"), world)
    state = State(net, adam(net))
    assert sharded_checkpoint.load(folder, state).name == f"step-{STEPS:08}" and state.step == STEPS
    state.save(folder / f"then-{world.world_size}.pt", Config(), write=world.is_main)
    train(net, state.optimizer, world, first=STEPS)
    state.save(folder / f"after-{world.world_size}.pt", Config(), write=world.is_main)
    sharded_checkpoint.save(folder / str(world.world_size), state)


def main() -> int:
    world = start(Config(timeout=60))
    what, *folder = sys.argv[1:]
    {"equal": equal, "save": save, "load": load}[what](world, *map(Path, folder))
    stop(world)
    return 0


if __name__ == "__main__":
    run_main(main)
