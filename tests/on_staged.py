"""What ranks do in test_staged.py: train with strategies that share a model; stop, resume, and end with the same bits.

torchrun --standalone --nproc-per-node 2 tests/on_staged.py pipeline_naive,spatial [FLAGS OF course_lib.train]
"""

import sys

import torch
from helpers import assert_same, result
from torch.optim.optimizer import register_optimizer_step_post_hook

from course_lib.config import Config, run_main
from course_lib.metrics import sum_over_ranks
from course_lib.parallel.staged import ranks_a_copy
from course_lib.trainer import fit
from course_lib.world import World, barrier, start, stop


def check_what_is_kept(kept: list[tuple[int, int]], config: Config, world: World) -> None:
    """After every step, before and after checkpoints: Adam's state of one's own stage, and all of it within a copy."""
    assert len(kept) == 12 and len(set(kept)) == 1, kept
    mine, all_of_it = kept[0]
    total = sum_over_ranks(torch.tensor([float(mine)]), world).item()
    assert mine < all_of_it and total == all_of_it * world.world_size / ranks_a_copy(config, world)


def main() -> int:
    config = Config.parse(sys.argv[2:])
    world = start(config)
    kept: list[tuple[int, int]] = []  # parameters with a state, and all: after every step of any optimizer
    register_optimizer_step_post_hook(
        lambda adam, *_: kept.append((len(adam.state), len(adam.param_groups[0]["params"])))
    )
    for strategy in sys.argv[1].split(","):
        whole, part = (config.replace(strategy=strategy, name=f"{strategy}-{name}") for name in ("whole", "part"))
        metrics = fit(whole, world).metrics
        asked = iter([False, False, world.rank == world.world_size - 1])  # one rank is told, and all stop
        assert not fit(part, world, told=lambda asked=asked: next(asked)).metrics
        assert fit(part.replace(resume=True), world).metrics == metrics
        if strategy.startswith("pipeline") or strategy == "hybrid":
            check_what_is_kept(kept, whole, world)
        kept.clear()
        barrier(world)
        if world.is_main:
            assert_same(result(part), result(whole))
            print(f"{strategy}: resumed to the same bits", flush=True)
    stop(world)
    return 0


if __name__ == "__main__":
    run_main(main)
