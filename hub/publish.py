"""Put the course where the servers of learners and teachers take it from.

python -m hub.publish FOLDER [--teachers GROUP]

FOLDER/learners has the files of `make release`: no solutions, no hidden tests. FOLDER/teachers has all files, and only the
group may look into it. A server takes what it can read.
"""

import argparse
import shutil
import sys
from pathlib import Path

from course_lib.config import run_main
from hub.site import ROOT
from lessons import release


def publish(folder: Path, names: list[str], mode: int = 0o755, group: str | None = None) -> None:
    """All files in one step: a server gets the old course or the new one."""
    new, old = (folder.with_name(f"{folder.name}.{word}") for word in ("new", "old"))
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir(mode=0o700, parents=True)
    for name in names:
        target = new / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        target.chmod(0o755 if (ROOT / name).stat().st_mode & 0o100 else 0o644)
    for path in new.rglob("*/"):
        path.chmod(0o755)
    if group:
        shutil.chown(new, group=group)
    new.chmod(mode)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    print(f"published {len(names)} files in {folder}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hub.publish", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--teachers", metavar="GROUP", help="who may read teachers/; without it: only you")
    options = parser.parse_args()
    folder = options.folder.resolve()
    publish(folder / "learners", [*release.files(), "hub/pull.py", "nbgrader_config.py"])
    publish(folder / "teachers", release.files(all=True), mode=0o750, group=options.teachers)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
