"""torchrun whose ranks are forked from it instead of started: they share its import of torch, most of what a short run costs.

Its agent, rendezvous, variables and exit codes are torchrun's own. Ranks that are killed are tested with torchrun as it is.
"""

import runpy
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # which the first optimizer would import on each rank
from torch.distributed import run
from torch.distributed.launcher import elastic_launch

import course_lib.trainer  # noqa: F401  and so most that ranks need


def be_rank(*words: str) -> None:
    """In the new process: what `python -u -m MODULE …` or `python -u SCRIPT …` would do."""
    torch.set_num_threads(1)
    _, *words = words
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def fork_ranks(config, entrypoint: str):
    config.start_method = "fork"
    return elastic_launch(config, be_rank)


if __name__ == "__main__":
    run.elastic_launch = fork_ranks
    run.main()
