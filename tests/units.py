"""What `make test` gives to a worker as a whole, and in which order. To pytest without workers it means nothing."""

from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# Files that need the same dear fixture, which is then made once. Of Slurm there is one: a cluster counts its jobs from the
# second in which it starts, the ranks of a job meet at a port that follows from its number, and two clusters may clash.
TOGETHER = {
    "cluster": ("test_reliability", "test_slurm", "test_jobs", "test_sweep"),
    "trained": ("test_ddp", "test_fabric", "test_lit", "test_mpi", "test_timeline"),
}
SPREAD = ("test_benchmarks", "test_grading", "test_lessons")  # each test is long, and none needs another


def unit_of(nodeid: str) -> str:
    """The name of what a test belongs to: a fixture, a file, or the test itself."""
    path, test = nodeid.split("::", 1)
    file = Path(path).stem
    if file in SPREAD:
        return "cluster" if "_on_slurm" in test else nodeid
    return next((fixture for fixture, files in TOGETHER.items() if file in files), file)


def turn_of(nodeid: str) -> int:
    """The longest units begin and the short ones fill the gaps at the end: Slurm, the hub, single tests, the other files."""
    unit = unit_of(nodeid)
    return 0 if unit in ("cluster", "test_hub") else 1 if "::" in unit else 2 if unit in TOGETHER else 3


class Units(LoadScopeScheduling):
    """--dist loadgroup would say the same with marks, but pytest-xdist 3.8 can't write them into pytest 9.2's node ids."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
