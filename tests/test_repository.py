"""What holds the project together: one list of dependencies, pins for all of them, a README that tells the truth."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from lessons import build

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def plain(name: str) -> str:
    return re.split(r"[\s<>=!~\[;]", name)[0].lower().replace("_", "-")


def test_environment_yml_cannot_drift_from_pyproject():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python, pip, from_pip = dependencies
    assert python == "python" + PROJECT["project"]["requires-python"]
    assert pip == "pip"
    assert from_pip == {"pip": ["-c constraints.txt", "-e .[dev]"]}


def test_every_dependency_is_pinned():
    pins = {plain(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    wanted = PROJECT["project"]["dependencies"] + sum(PROJECT["project"]["optional-dependencies"].values(), [])
    assert not {plain(name) for name in wanted} - pins
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().split()


def test_every_import_of_the_library_is_declared():
    names = {
        "yaml": "pyyaml",
        "PIL": "pillow",
        "IPython": "ipykernel",
        "jupyter_client": "ipykernel",
        "papermill": "papermill",
        "sqlalchemy": "nbgrader",
    }
    own = {"course_lib", "lessons", "tests", "benchmarks"}
    declared = {plain(name) for name in PROJECT["project"]["dependencies"]} | {
        "horovod"
    }  # by make horovod, or not at all
    for path in tracked("course_lib/*.py", "lessons/*.py", "nbgrader_config.py"):
        for module in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.M):
            if module not in sys.stdlib_module_names | own and module == module.strip("_"):
                assert plain(names.get(module, module)) in declared, f"{path.name} imports {module}"


@pytest.mark.parametrize(
    "version, fine", [((3, 11, 5), True), ((3, 14, 1), True), ((3, 11, 4), False), ((3, 15, 0), False)]
)
def test_an_unsupported_python_fails_at_once_with_a_clear_line(version, fine):
    code = f"import sys, runpy; sys.version_info = {version}; runpy.run_path('.ci/check_python.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if fine:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert PROJECT["project"]["requires-python"] in done.stderr


def test_make_prints_every_target_with_one_line():
    printed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    text = (ROOT / "Makefile").read_text()
    wanted = re.search(r"^\.PHONY: (.*)$", text, re.M).group(1).split()
    assert [line.split()[0] for line in printed.splitlines()] == wanted
    assert all(len(line.split()) > 2 for line in printed.splitlines())


def test_ci_calls_make_test():
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make test")


def test_readme_maps_every_lesson_and_names_only_what_exists():
    readme = (ROOT / "README.md").read_text()
    for source in build.sources():
        assert f"notebooks/{source.stem}.ipynb" in readme
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", readme) + re.findall(r'src="([^"]+)"', readme):
        assert (ROOT / target).exists(), target
    for command in re.findall(r"`make ([a-z-]+)`", readme):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), command


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_is_content(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_no_machine_paths_in_the_tree():
    pattern = re.compile(r"/(home/[a-z]+|root|work)/")
    for path in tracked():
        if path.suffix != ".png":
            assert not pattern.search(path.read_text()), path
