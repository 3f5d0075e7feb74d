"""Checkpoints of which every rank writes its own part; any other number of ranks can read them.

Each goes to a folder of its own, named by its step. torch writes the list of parts (.metadata) last: a folder without one was
cut off and does not count. That list is a pickle: read what you have written, not what you have found.
"""

from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from course_lib.checkpoint import State
from course_lib.config import UserError


def _parts(state: State) -> dict:
    """By name, as DTensors where the ranks have parts of them; nothing is brought together."""
    model, optimizer = get_state_dict(state.model, state.optimizer)
    position = {"step": state.step, "epoch": state.epoch, "seen": state.seen}
    return {"model": model, "optimizer": optimizer, "position": position, "random": torch.get_rng_state()}


def _folder(run: Path, state: State) -> Path:
    return Path(run, f"step-{state.step:08}")


def save(run: Path, state: State) -> None:
    """All ranks write at once, and wait for each other."""
    dcp.save(_parts(state), checkpoint_id=_folder(run, state))


def save_in_background(run: Path, state: State, group: dist.ProcessGroup) -> Future:
    """All ranks make a copy, and a thread writes it while training goes on; .result() waits for it.

    The threads talk in a group of their own, dist.new_group(backend="gloo"): in that of the training their messages would
    meet gradients.
    """
    return dcp.async_save(_parts(state), checkpoint_id=_folder(run, state), process_group=group)


def newest(run: Path) -> Path:
    """The last checkpoint that is complete."""
    complete = sorted(path.parent for path in Path(run).glob("step-*/.metadata"))
    if not complete:
        raise UserError(f"{run} holds no complete sharded checkpoint (step-*/.metadata): nothing to resume")
    return complete[-1]


def load(run: Path, state: State) -> Path:
    """Go on from the newest: every rank reads what it needs of all parts, whoever wrote them."""
    folder, parts = newest(run), _parts(state)
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(state.model, state.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    state.step, state.epoch, state.seen = (parts["position"][name] for name in ("step", "epoch", "seen"))
    torch.set_rng_state(parts["random"])
    return folder
