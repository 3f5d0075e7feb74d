"""Lesson 12: a recurrent net learns to read digits, with Lightning Fabric, which starts the other rank."""

import sys
from itertools import islice

import torch
from lightning.fabric import Fabric

from course_lib.config import Config
from course_lib.data.batches import Batches
from course_lib.data.tasks import make_task
from course_lib.trainer import make_model
from course_lib.world import World

torch.set_num_threads(1)
config = Config.parse(sys.argv[1:])
fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
fabric.print(f"Fabric has chosen {type(fabric.strategy).__name__} on {fabric.world_size} ranks")
world = World(rank=fabric.global_rank, world_size=fabric.world_size)
task = make_task(config)
model = make_model(config, task)
optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
model, optimizer = fabric.setup(model, optimizer)

for indices in islice(Batches(len(task.train), config.batch, world=world), config.max_steps):
    x, y = (torch.stack(part) for part in zip(*(task.train[index] for index in indices)))
    optimizer.zero_grad()
    loss = task.score.loss(model(x), y)
    fabric.backward(loss)
    optimizer.step()

config.run.mkdir(parents=True, exist_ok=True)
fabric.save(config.run / "weights.pt", model.state_dict())
