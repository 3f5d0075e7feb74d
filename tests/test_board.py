"""TensorBoard: what it serves is what the run has logged, through the Jupyter server and only for who may see it."""

import json
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from helpers import environment, wait_until

from course_lib import board, lit
from course_lib.config import UserError
from course_lib.metrics import read_log
from course_lib.processes import kill_tree


@pytest.fixture(scope="module")
def run(base) -> Path:
    config = base.replace(name="boarded", max_steps=6)
    lit.fit(config)
    return config.run


def test_it_serves_the_runs_curves_and_ends_when_it_is_told(run):
    shown = board.show(run)
    try:
        tags = shown.tags()
        assert list(tags) == ["lightning/tensorboard"]
        assert {"loss", "lr-Adam", "samples_per_s", "valid_loss"} <= set(tags["lightning/tensorboard"])
        steps = [event for event in read_log(run) if event["event"] == "step"]
        logged = [(event["step"] - 1, pytest.approx(event["loss"])) for event in steps]
        assert shown.points("lightning/tensorboard", "loss") == logged
        assert f'src="/proxy/{shown.port}/"' in shown._repr_mimebundle_()["text/html"]
        others = board.show(run)
        assert not shown.process.is_running() or shown.process.status() == psutil.STATUS_ZOMBIE
    finally:
        for one in list(board._running):
            one.stop()
    assert others.process.poll() is not None


def find_server(folder: Path) -> str:
    """Its address once it answers; it writes that down a moment before it listens."""
    try:
        [info] = folder.glob("jpserver-*.json")
        address = json.loads(info.read_text())["url"].rstrip("/")
        with urllib.request.urlopen(f"{address}/login", timeout=60):
            return address
    except (ValueError, OSError):
        return ""


def test_the_page_reaches_it_through_the_jupyter_server_with_its_token_alone(run, tmp_path):
    flags = ["--ServerApp.port=0", "--no-browser", "--allow-root", "--IdentityProvider.token=secret"]
    variables = environment(JUPYTER_RUNTIME_DIR=str(tmp_path))
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-m", "jupyter", "lab", *flags, f"--ServerApp.root_dir={tmp_path}"]
        server = psutil.Popen(command, env=variables, stdout=log, stderr=log)
    shown = board.show(run)
    try:
        wait_until(lambda: find_server(tmp_path), seconds=120, every=0.1)
        page = f"{find_server(tmp_path)}{shown.address}data/plugin/scalars/tags"
        shown.tags()  # by now it has read the files
        request = urllib.request.Request(page, headers={"Authorization": "token secret"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "lightning/tensorboard" in json.load(answer)
        with urllib.request.urlopen(page, timeout=60) as answer:  # without it
            assert "/login?" in answer.url and b"lightning" not in answer.read()
    finally:
        shown.stop()
        kill_tree([server])


def test_a_folder_without_runs_is_one_clear_line(tmp_path):
    with pytest.raises(
        UserError, match=r"holds no run that was logged for TensorBoard; train with course_lib.lit first"
    ):
        board.show(tmp_path)
