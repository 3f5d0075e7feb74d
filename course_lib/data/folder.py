"""A folder of data is filled as a whole or not at all; its about.json says what it holds."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from course_lib.config import UserError


def fill(out: Path, wanted: str, write: Callable[[Path], Sequence[Path]]) -> None:
    """Have `write` make the files in a folder of their own, then move them to `out`; unless the same are there already."""
    about = out / "about.json"
    if about.exists():
        if (was := json.loads(about.read_text())["source"]) != wanted:
            raise UserError(f"{out} holds '{was}', not '{wanted}': delete it or choose another --out")
        print(f"{out}: {wanted}: there already")
        return
    with tempfile.TemporaryDirectory(dir=out) as folder:
        files = write(Path(folder))
        last = Path(folder) / about.name  # which says that all is there
        last.write_text(json.dumps({"source": wanted}) + "\n")
        for path in (*files, last):
            os.replace(path, out / path.name)
    print(f"{out}: {wanted}")
