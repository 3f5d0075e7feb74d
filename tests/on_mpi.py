"""What ranks do in test_mpi.py: gradients averaged by MPI, by our ring and by Horovod, and the same weights as with torch's DDP.

mpirun -n 2 python -m mpi4py tests/on_mpi.py 2 mpi mpi_ring horovod
"""

import sys

import torch

from course_lib.config import Config
from course_lib.parallel import STRATEGIES
from course_lib.parallel.horovod import wrap_optimizer
from course_lib.trainer import train_step
from course_lib.unet import UNet
from course_lib.world import World, start, stop


def train(name: str, world: World) -> list[torch.Tensor]:
    """The weights after five steps; the ranks begin with different ones and must take rank 0's."""
    torch.manual_seed(world.rank)
    model = UNet(3, 2, width=4, depth=2, padding="circular")
    torch.nn.init.normal_(model.head.weight, std=0.1)
    config = Config(strategy=name, launcher="mpi", bucket_mb=0.01)  # several buckets
    wrapped, sync = STRATEGIES[name](model, world, config)
    optimizer = wrap_optimizer(wrapped, torch.optim.Adam(model.parameters(), lr=0.01))
    random = torch.Generator().manual_seed(world.rank)
    for _ in range(5):
        batch = torch.randn(4, 3, 16, 16, generator=random), torch.randn(4, 2, 16, 16, generator=random)
        train_step(wrapped, batch, optimizer, sync)
    return [parameter.detach().clone() for parameter in model.parameters()]


def main() -> None:
    ranks, *names = sys.argv[1:]
    world = start(Config(launcher="mpi", device="cpu", timeout=60))
    assert world.world_size == int(ranks)
    right = train("ddp", world)
    for name in names:
        found = train(name, world)
        for mine, theirs in zip(found, right):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        same = all(map(torch.equal, found, right))
        print(f"<{world.rank}: {name} {'to the last bit' if same else 'to rounding'}>", flush=True)
    stop(world)


if __name__ == "__main__":
    main()
