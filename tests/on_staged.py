"""What ranks do in test_staged.py: train with strategies that share a model; stop, resume, and end with the same bits.

torchrun --standalone --nproc-per-node 2 tests/on_staged.py pipeline_naive,spatial [FLAGS OF course_lib.train]
"""

import sys

from helpers import assert_same, result

from course_lib.config import Config, run_main
from course_lib.trainer import fit
from course_lib.world import barrier, start, stop


def main() -> int:
    config = Config.parse(sys.argv[2:])
    world = start(config)
    for strategy in sys.argv[1].split(","):
        whole, part = (config.replace(strategy=strategy, name=f"{strategy}-{name}") for name in ("whole", "part"))
        metrics = fit(whole, world).metrics
        asked = iter([False, False, world.rank == world.world_size - 1])  # one rank is told, and all stop
        assert not fit(part, world, told=lambda asked=asked: next(asked)).metrics
        assert fit(part.replace(resume=True), world).metrics == metrics
        barrier(world)
        if world.is_main:
            assert_same(result(part), result(whole))
            print(f"{strategy}: resumed to the same bits", flush=True)
    stop(world)
    return 0


if __name__ == "__main__":
    run_main(main)
