"""What ranks do in test_pipeline.py: each holds one stage, and compares its gradients with those of the whole model.

torchrun --standalone --nproc-per-node 3 tests/on_stages.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.config import Config
from course_lib.parallel.pipeline import GPipe, torch_schedule
from course_lib.parallel.split import split
from course_lib.parallel.staged import Pipeline
from course_lib.timeline import Timeline
from course_lib.unet import UNet
from course_lib.world import World, start, stop

BATCH = 6


def make(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "sequential":  # as an EfficientNet is: blocks in a row
        layers = [nn.Sequential(nn.Conv2d(c, 2 * c, 3, stride=2, padding=1), nn.SiLU()) for c in (3, 6, 12)]
        net = nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 2)))
        x, y = torch.randn(BATCH, 3, 17, 20), torch.randn(BATCH, 2)
    else:
        options = {"residual": {"residual": True}, "lean": {"checkpointing": True}, "deep": {"depth": 3}}.get(kind, {})
        net = UNet(3, 2, **{"width": 4, "depth": 2} | options)
        nn.init.normal_(net.head.weight)
        x, y = torch.randn(BATCH, 3, 17, 20), torch.randn(BATCH, 2, 17, 20)
    return net.double(), x.double(), y.double()


def whole_gradients(net: nn.Module, x, y) -> dict[int, torch.Tensor]:
    """Of every parameter, by its place in memory; the loss too."""
    loss = F.mse_loss(net(x), y)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return {id(p): g for p, g in zip(net.parameters(), gradients)} | {0: loss.detach()}


def check(stage: nn.Module, expected: dict, loss, what: str, last: bool) -> None:
    for name, parameter in stage.named_parameters():
        difference = (parameter.grad - expected[id(parameter)]).abs().max()
        assert difference < 1e-12, f"{what}: the gradient of {name} is off by {difference}"
        parameter.grad = None
    assert not last or abs(loss - expected[0]) < 1e-12, what


def check_hybrid(world: World) -> None:
    """Two copies of the model that see different samples: the gradients of the whole batch, not twice or half of them."""
    net, x, y = make("residual")
    expected, output = whole_gradients(net, x, y), net(x)
    stages = world.world_size // 2
    half = slice(0, 3) if world.rank < stages else slice(3, BATCH)
    pipeline = Pipeline(net, world, Config(strategy="hybrid", devices=stages, batch=3, micro_batches=3, bucket_mb=1e-3))
    for _ in range(2):
        loss = pipeline.forward_backward(x[half], y[half], F.mse_loss)
        pipeline.sync()
        dist.all_reduce(loss)
        check(pipeline.stage, expected, loss / world.world_size, f"two copies of {stages} stages", True)
    with torch.no_grad():
        assert torch.allclose(pipeline(x[half]), output[half], rtol=0, atol=1e-12)


def main() -> None:
    world = start(Config(timeout=60))
    last = world.rank == world.world_size - 1
    done = 0
    for kind in ("plain", "residual", "lean", "deep", "sequential"):
        net, x, y = make(kind)
        expected = whole_gradients(net, x, y)
        stages = split(net, world.world_size)
        for micro in (1, 2, 3, 6):
            timeline = Timeline()
            pipe = GPipe(stages, x, micro_batches=micro, timeline=timeline)
            for _ in range(2):
                loss = pipe.step(x, y, F.mse_loss)
                check(pipe.stage, expected, loss, f"by hand, {kind}, {micro} micro-batches", last)
            output = pipe.evaluate(x)
            assert not last or torch.allclose(output, net(x), rtol=0, atol=1e-12)
            names = [span.kind for span in timeline.spans]
            assert names.count("forward") == names.count("backward") == 2 * micro
            done += 1
        for name, micro in (("gpipe", 3), ("gpipe", 6), ("1f1b", 6)):
            schedule = torch_schedule(name, stages, x, micro_batches=micro, measure=F.mse_loss)
            losses = []
            schedule.step(*([x] if world.rank == 0 else []), **({"target": y, "losses": losses} if last else {}))
            loss = torch.stack(losses).mean() if last else None
            check(stages[world.rank], expected, loss, f"torch's {name}, {kind}, {micro} micro-batches", last)
            done += 1
    check_hybrid(world)
    dist.barrier()
    print(f"rank {world.rank}: {done} pipelines equal the whole, and so do two copies", flush=True)
    del schedule, pipe
    stop(world)


if __name__ == "__main__":
    main()
