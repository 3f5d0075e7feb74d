"""What an exercise's check says: not only that an answer is wrong, but which rank, which element, and how it looks like that.

got = on_ranks(3, lambda rank: average(gradients[rank]))
same(got, [mean] * 3, "the average on 3 ranks", ranks=True, mistakes={"a sum: divide by the world size": [total] * 3})
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from course_lib.trial import TrialError, alone, on_mpi, on_ranks, prepare
from course_lib.trial_rank import unseen

__all__ = [
    "TrialError",
    "WrongAnswer",
    "alone",
    "difference",
    "on_mpi",
    "on_ranks",
    "prepare",
    "require",
    "same",
    "unseen",
]


class WrongAnswer(AssertionError):
    """What differs, where, and what it looks like."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this: the finding, not the check's own lines."""
        return [f"{type(self).__name__}: {self}"]


def same(
    got: Any,
    wanted: Any,
    what: str,
    *,
    ranks: bool = False,
    mistakes: Mapping[str, Any] | None = None,
    close: float = 1e-5,
) -> None:
    """Say that `what` is right, or where it differs first. `ranks`: both are lists with an entry for each rank.

    mistakes: {what one might have done: what would come out then}.
    """
    found = difference(got, wanted, ranks=ranks, close=close)
    if not found:
        return print(f"right: {what}")
    for mistake, wrong in (mistakes or {}).items():
        if not difference(got, wrong, ranks=ranks, close=close):
            found += f"{'' if found.endswith('?') else '.'} This is {mistake}"
            break
    raise WrongAnswer(f"{what}: {found}")


def require(condition: bool, what: str, why: str) -> None:
    """Say that `what` is right, or why it is not."""
    if not condition:
        raise WrongAnswer(f"{what}: {why}")
    print(f"right: {what}")


def difference(got: Any, wanted: Any, *, ranks: bool = False, close: float = 1e-5) -> str:
    """Where two values part, in words; "" if they are the same."""
    if ranks:
        pairs = enumerate(zip(got, wanted))
        return next((f"rank {rank}: {found}" for rank, pair in pairs if (found := difference(*pair, close=close))), "")
    if wanted is not None and got is None:
        return f"None, where {_short(wanted)} is expected; is there a return?"
    if isinstance(wanted, torch.Tensor | np.ndarray):
        return _tensors(got, torch.as_tensor(wanted), close)
    if isinstance(wanted, Mapping):
        return _mappings(got, wanted, close)
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _sequences(got, wanted, close)
    if isinstance(got, torch.Tensor | np.ndarray):
        if not isinstance(wanted, Real) or isinstance(wanted, bool) or math.prod(got.shape) != 1:
            return f"a tensor of shape {tuple(got.shape)}, where {_short(wanted)} is expected"
        got = got.item()
    if isinstance(wanted, float) and isinstance(got, Real):
        equal = math.isclose(got, wanted, rel_tol=close, abs_tol=close / 10)
    else:
        equal = type(got) is type(wanted) or isinstance(got, Integral) is isinstance(wanted, Integral)
        equal = equal and got == wanted
    kinds = [f" ({_a(value)})" if type(got) is not type(wanted) else "" for value in (got, wanted)]
    return "" if equal else f"{_short(got)}{kinds[0]}, expected {_short(wanted)}{kinds[1]}"


def _tensors(got: Any, wanted: torch.Tensor, close: float) -> str:
    if not isinstance(got, torch.Tensor | np.ndarray):
        return f"{_a(got)}, where a tensor of shape {tuple(wanted.shape)} is expected"
    got = torch.as_tensor(got)
    if got.shape != wanted.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    got, wanted = got.detach().double(), wanted.detach().double()
    wrong = (~torch.isclose(got, wanted, rtol=close, atol=close / 10)).nonzero()
    if not len(wrong):
        return ""
    where = tuple(wrong[0].tolist())
    element = f"element [{', '.join(map(str, where))}] is " if where else ""
    count = f", and {len(wrong) - 1} more of {got.numel()} differ" if len(wrong) > 1 else ""
    return f"{element}{got[where].item():.6g}, expected {wanted[where].item():.6g}{count}"


def _mappings(got: Any, wanted: Mapping, close: float) -> str:
    if not isinstance(got, Mapping):
        return f"{_a(got)}, where a dictionary is expected"
    for key in [*wanted, *got]:
        if key not in got or key not in wanted:
            return f"{key!r} is {'missing' if key in wanted else 'not expected'}"
        if found := difference(got[key], wanted[key], close=close):
            return f"{key!r}: {found}"
    return ""


def _sequences(got: Any, wanted: Sequence, close: float) -> str:
    if isinstance(got, torch.Tensor | np.ndarray | range):
        got = list(got) if isinstance(got, range) else got.tolist()
    if not isinstance(got, Sequence) or isinstance(got, str):
        return f"{_a(got)}, where a list of {len(wanted)} is expected"
    for number, pair in enumerate(zip(got, wanted)):
        if found := difference(*pair, close=close):
            return f"number {number}{', ' if found.startswith(('number', 'element', 'shape')) else ' is '}{found}"
    return "" if len(got) == len(wanted) else f"a list of {len(got)} ({_short(got)}), expected {len(wanted)}"


def _a(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeioAEIO' else 'a'} {kind}"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else reprlib.repr(value)
