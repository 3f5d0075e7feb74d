"""Lesson 12: a recurrent net learns to read digits, in one process."""

import sys
from itertools import islice

import torch

from course_lib.config import Config
from course_lib.data.batches import Batches
from course_lib.data.tasks import make_task
from course_lib.trainer import make_model

torch.set_num_threads(1)
config = Config.parse(sys.argv[1:])
task = make_task(config)
model = make_model(config, task)
optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)

for indices in islice(Batches(len(task.train), config.batch), config.max_steps):
    x, y = (torch.stack(part) for part in zip(*(task.train[index] for index in indices)))
    optimizer.zero_grad()
    loss = task.score.loss(model(x), y)
    loss.backward()
    optimizer.step()

config.run.mkdir(parents=True, exist_ok=True)
torch.save(model.state_dict(), config.run / "weights.pt")
