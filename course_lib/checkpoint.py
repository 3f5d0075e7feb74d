"""Checkpoints that are always whole, and a resume that goes on as if nothing had happened.

The file is written beside its name and then renamed over it: a reader, or a run after a crash, finds the old one or the new
one and never half of one. It holds tensors and plain values only, so it loads with weights_only=True.
"""

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from course_lib.config import Config, UserError

# What must not change between a run and its continuation. The data may move and the ranks may become more or fewer.
SAME = ("task", "variables", "train_years", "lead", "width", "depth", "norm", "padding", "lr", "warmup", "seed")


def save(path: Path, state: dict) -> None:
    """Write a checkpoint atomically: written, flushed to disk, then renamed."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename too must survive a power cut
    finally:
        os.close(folder)


def load(path: Path) -> dict:
    """Read a checkpoint onto the CPU; one that is damaged or would run code is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch.load itself does not compare the checksums
                raise zipfile.BadZipFile(f"{damaged} is damaged")
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} is not there: nothing to resume; leave out --resume to start anew") from None
    except Exception as error:  # a file that is no checkpoint can make the reader raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is no checkpoint that can be trusted ({reason}); delete it and start anew") from error


def compare(path: Path, other: Path, start: nn.Module) -> tuple[float, float]:
    """How far apart two trainings with the same start are: (weights, gradients).

    Weights in parts of the way that the other has gone; Adam's averages of the gradients in parts of their length. Adam divides
    by a gradient's size, so weights alone would not tell if all gradients were twice as long.
    """
    sides = []
    for content in (load(path), load(other)):
        averages = [state["exp_avg"] for _, state in sorted(content["optimizer"]["state"].items())]
        sides.append([torch.cat([t.flatten() for t in several]) for several in (content["model"].values(), averages)])
    (weights, average), (its_weights, its_average) = sides
    begun = torch.cat([tensor.cpu().flatten() for tensor in start.state_dict().values()])
    way, length = (its_weights - begun).norm(), its_average.norm()
    return ((weights - its_weights).norm() / way).item(), ((average - its_average).norm() / length).item()


def launch_of(path: Path) -> str:
    """The launch that wrote a checkpoint; "" where there is none, or none that can be read."""
    try:
        return load(path)["launch"]
    except (UserError, KeyError, TypeError, IndexError):
        return ""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which the ranks have parts (a DTensor), brought together on all of them."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(there: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor, as this rank has the one that it shall replace: the same part of it."""
    if not hasattr(there, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # a second's import, which those without parts don't need

    return distribute_tensor(tensor.to(there.device), there.device_mesh, there.placements, src_data_rank=None)


@dataclass
class State:
    """All that a run must know to go on: weights, optimizer, and where in the data it stands."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    epoch: int = 0
    seen: int = 0  # samples of this epoch that are done
    launch: str = ""

    def save(self, path: Path, config: Config, *, write: bool = True) -> None:
        """Write everything, with the config that made it. Where ranks share weights, all must come here; one writes."""
        optimizer = self.optimizer.state_dict()
        states = {number: {name: whole(t) for name, t in one.items()} for number, one in optimizer["state"].items()}
        content = {
            "model": {name: whole(tensor) for name, tensor in self.model.state_dict().items()},
            "optimizer": optimizer | {"state": states},
            "position": {"step": self.step, "epoch": self.epoch, "seen": self.seen},
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
            "config": vars(config),
            "launch": self.launch,
        }
        if write:
            save(path, content)

    def load(self, path: Path, config: Config) -> None:
        """Go on from a checkpoint, if it is one of the same training."""
        content = load(path)
        try:
            was = content["config"]
            for name in SAME:
                if was[name] != getattr(config, name):
                    flag = "--" + name.replace("_", "-")
                    raise UserError(
                        f"{path} was trained with {flag} {was[name]}, not {getattr(config, name)}: can't go on"
                    )
            there = self.model.state_dict()
            self.model.load_state_dict({name: like(there.get(name), t) for name, t in content["model"].items()})
            states, parameters = content["optimizer"]["state"], list(self.model.parameters())
            for number, one in states.items():
                states[number] = {name: like(parameters[number], t) if t.ndim else t for name, t in one.items()}
            self.optimizer.load_state_dict(content["optimizer"])
            self.step, self.epoch, self.seen = (content["position"][name] for name in ("step", "epoch", "seen"))
            torch.set_rng_state(content["random"])
            if content["random_cuda"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(content["random_cuda"])
        except UserError:
            raise
        except Exception as error:  # whatever the parts of a foreign file make of it
            raise UserError(
                f"{path} is not a checkpoint of this model ({error!r}); train anew under another --name"
            ) from error
