"""Lesson 10: a training loop with PyTorch's DistributedDataParallel; torchrun starts it."""

import sys
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib.config import Config
from course_lib.data.batches import Batches
from course_lib.data.tasks import make_task
from course_lib.trainer import make_model
from course_lib.world import World, stop

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = World(rank=dist.get_rank(), world_size=dist.get_world_size())
assert world.world_size > 1, "a world of one: was it the right launcher?"
config = Config.parse(sys.argv[1:])
task = make_task(config)
model = make_model(config, task)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)

for indices in islice(Batches(len(task.train), config.batch, world=world), config.max_steps):
    x, y = (torch.stack(part) for part in zip(*(task.train[index] for index in indices)))
    optimizer.zero_grad()
    loss = F.mse_loss(wrapped(x), y)
    loss.backward()
    optimizer.step()

if world.is_main:
    config.run.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), config.run / "weights.pt")
del wrapped
stop(world)
