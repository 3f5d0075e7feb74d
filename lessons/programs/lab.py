"""A net learns to smooth images. Every case of the labs is this program with something wrong in it, or around it."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from course_lib.timeline import Timeline

data, run = Path(sys.argv[1]), Path(sys.argv[2])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
epochs, batch = 2, 4
timeline = Timeline()


class Images(Dataset):
    """An image a file; to be learnt is the same image, smoothed."""

    def __init__(self, folder: Path):
        self.paths = sorted(folder.glob("*.npy"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        x = torch.from_numpy(np.load(self.paths[index]))  # (channel, y, x)
        return index, x, F.avg_pool2d(x, 3, stride=1, padding=1)


def note(event: str, **values) -> None:
    print(json.dumps({"rank": rank, "event": event, **values}), flush=True)


def average_gradients() -> None:
    for parameter in model.parameters():
        with timeline.span("communicate"):
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.GroupNorm(2, 8),
    nn.ReLU(),
    nn.Conv2d(8, 1, 3, padding=1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
train, valid = Images(data / "train"), Images(data / "valid")
sampler = DistributedSampler(train, drop_last=True)
mine = range(rank, len(valid), ranks)
note("start", weights=sum(parameter.sum().item() for parameter in model.parameters()))

for epoch in range(epochs):
    model.train()
    sampler.set_epoch(epoch)
    for samples, x, y in timeline.watch(DataLoader(train, batch, sampler=sampler)):
        optimizer.zero_grad()
        with timeline.span("forward"):
            loss = F.mse_loss(model(x), y)
        with timeline.span("backward"):
            loss.backward()
        average_gradients()
        optimizer.step()
        note("step", epoch=epoch, loss=loss.item(), samples=samples.tolist())

    model.eval()
    with torch.no_grad():
        errors = [F.mse_loss(model(x[None]), y[None]).item() for _, x, y in map(valid.__getitem__, mine)]
    buffers = sum(buffer.sum().item() for buffer in model.buffers())
    note("evaluated", epoch=epoch, mean=sum(errors) / len(errors), images=len(errors), buffers=buffers)
    total = torch.tensor([sum(errors), len(errors)])
    dist.all_reduce(total)
    average = (total[0] / total[1]).item()
    note("valid", epoch=epoch, loss=average)

    if rank == 0:
        torch.save(model.state_dict(), run / f"epoch{epoch}.pt")
    dist.barrier()
    model.load_state_dict(torch.load(run / f"epoch{epoch}.pt"))

note("end", weights=sum(parameter.sum().item() for parameter in model.parameters()))
