"""Every lesson runs from top to bottom at smoke size, and its numbers stay where they were."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from helpers import ROOT, wait_until

from course_lib.processes import kill_tree
from lessons import build, run

LESSONS = build.sources()
PLAIN = "test_lesson_runs_and_keeps_its_numbers"
BESIDE = """
import json, sys
from pathlib import Path
from lessons import build, run
for source in build.sources():
    if source.stem in sys.argv[2:]:
        out = Path(sys.argv[1], source.stem)
        try:
            found = run.run(source, smoke=True, out=out, parameters={"runs": str(out / "runs")})
        except Exception as error:
            found = {"error": str(error)}
        (out / "part").write_text(json.dumps(found))
        (out / "part").rename(out / "found.json")
"""
SLURM = [source for source in LESSONS if "jobs.find_cluster()" in source.read_text()]


def run_and_compare(source, folder, **parameters) -> None:
    check(source, run.run(source, smoke=True, out=folder, parameters={"runs": str(folder / "runs")} | parameters))


def check(source, numbers: dict) -> None:
    baseline = json.loads((run.BASELINES / f"{source.stem}.json").read_text())
    assert not (complaints := run.compare(numbers, baseline)), "\n".join(complaints)


@pytest.fixture(scope="module", autouse=True)
def beside(request, tmp_path_factory) -> Iterator[tuple[Path, psutil.Popen]]:
    """Most lessons run one after the other in a process of their own, while the others run here."""
    wanted = [item.callspec.params["source"].stem for item in request.session.items if item.originalname == PLAIN]
    folder = tmp_path_factory.mktemp("beside")
    if wanted:
        run.smoke_parameters(wanted[0])  # the data first: two at once would be in each other's way
    with open(folder / "log", "w") as log:
        process = psutil.Popen([sys.executable, "-c", BESIDE, folder, *wanted], cwd=ROOT, stdout=log, stderr=log)
    yield folder, process
    kill_tree([process])


@pytest.mark.integration
@pytest.mark.parametrize("source", SLURM, ids=lambda source: source.stem)
def test_lesson_with_jobs_runs_on_slurm(source, slurm, tmp_path):
    run_and_compare(source, tmp_path)


@pytest.mark.parametrize("source", SLURM, ids=lambda source: source.stem)
def test_lesson_with_jobs_has_the_same_numbers_without_slurm(source, no_slurm, tmp_path):
    run_and_compare(source, tmp_path)
    assert "not run here, but recorded" in (tmp_path / f"{source.stem}.ipynb").read_text()


def test_the_lesson_on_horovod_has_the_same_numbers_without_it(tmp_path):
    [source] = [one for one in LESSONS if one.stem == "10_horovod"]
    run_and_compare(source, tmp_path, horovod=False)
    assert "not run here, but recorded" in (tmp_path / f"{source.stem}.ipynb").read_text()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("source", [one for one in LESSONS if one not in SLURM], ids=lambda source: source.stem)
def test_lesson_runs_and_keeps_its_numbers(source, beside):
    folder, process = beside
    file = folder / source.stem / "found.json"
    wait_until(lambda: file.exists() or process.poll() is not None, seconds=1400, every=0.5)
    assert file.exists(), (folder / "log").read_text()
    found = json.loads(file.read_text())
    assert "error" not in found, found["error"]
    check(source, found)


def test_notebooks_are_built_from_their_sources(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["build", "--check"])
    assert build.main() == 0, capsys.readouterr().err


def test_the_check_notices_an_edited_a_missing_and_an_orphaned_notebook(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "lessons").mkdir()
    for name in ("00_one", "01_two"):
        (tmp_path / "lessons" / f"{name}.py").write_text('# %% [markdown]\n# # Title\n\n# %%\nprint("hello")\n')
    monkeypatch.setattr("sys.argv", ["build"])
    assert build.main() == 0
    monkeypatch.setattr("sys.argv", ["build", "--check"])
    assert build.main() == 0
    notebooks = tmp_path / "notebooks"
    (notebooks / "00_one.ipynb").write_text((notebooks / "00_one.ipynb").read_text().replace("hello", "goodbye"))
    (notebooks / "01_two.ipynb").rename(notebooks / "02_orphan.ipynb")
    capsys.readouterr()
    assert build.main() == 1
    told = capsys.readouterr().err
    assert all(f"{name}.ipynb" in told for name in ("00_one", "01_two", "02_orphan"))
    assert "make notebooks" in told


def test_a_learners_work_is_never_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "lessons").mkdir()
    sources = [tmp_path / "lessons" / name for name in ("00_untouched.py", "01_run.py", "02_gone.py")]
    for source in sources:
        source.write_text("# %%\n1 + 1\n")
    monkeypatch.setattr("sys.argv", ["build"])
    build.main()
    worked = [tmp_path / "notebooks" / name for name in ("01_run.ipynb", "02_gone.ipynb")]
    for path in worked:  # as Lab saves a notebook that has been run
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[0].execution_count = 1
        nbformat.write(notebook, path)
    before = [path.read_text() for path in worked]
    for source in sources[:2]:
        source.write_text("# %%\n1 + 2\n")
    sources[2].unlink()
    capsys.readouterr()
    build.main()
    told = capsys.readouterr().out
    assert [path.read_text() for path in worked] == before
    assert "1 + 2" in (tmp_path / "notebooks" / "00_untouched.ipynb").read_text()
    assert told.count("kept notebooks/") == 2
    monkeypatch.setattr("sys.argv", ["build", "--force"])
    build.main()
    assert "1 + 2" in worked[0].read_text()
    assert not worked[1].exists()


@pytest.mark.parametrize("source", LESSONS, ids=lambda source: source.stem)
def test_lesson_has_the_parts_that_every_lesson_has(source):
    notebook = nbformat.reads(build.build(source), as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1, "one parameters cell"
    assert all(not cell.get("outputs") for cell in notebook.cells)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for part in ("After this lesson", "## What you have seen", "**Next:**"):
        assert part in text, part
    assert "numbers(" in notebook.cells[-2].source + notebook.cells[-3].source, "it ends with its numbers"


def test_compare_complains_about_strays_and_gaps():
    baseline = {"loss": {"value": 0.5, "tolerance": 0.1}, "count": {"value": 10, "tolerance": 0}}
    assert run.compare({"loss": 0.549, "count": 10}, baseline) == []
    assert "loss" in run.compare({"loss": 0.551, "count": 10}, baseline)[0]
    assert "count" in run.compare({"loss": 0.5, "count": 11}, baseline)[0]
    assert "not recorded" in run.compare({"loss": 0.5}, baseline)[0]
    assert "no baseline" in run.compare({"loss": 0.5, "count": 10, "new": 1}, baseline)[0]
    assert run.compare({"loss": float("nan"), "count": 10}, baseline), "a NaN is never within tolerance"


def test_renew_keeps_tolerances_that_somebody_has_set(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "BASELINES", tmp_path)
    (tmp_path / "x.json").write_text(json.dumps({"loss": {"value": 1.0, "tolerance": 0.01}}))
    run.renew("x", {"loss": 2.0, "skill": 0.5})
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "loss": {"value": 2.0, "tolerance": 0.01},
        "skill": {"value": 0.5, "tolerance": run.TOLERANCE},
    }


def test_a_failing_cell_fails_the_run(tmp_path):
    source = tmp_path / "00_broken.py"
    source.write_text('# %% tags=["parameters"]\nsize = 1\n\n# %%\nassert size == 2, "size is wrong"\n')
    with pytest.raises(run.papermill.PapermillExecutionError, match="size is wrong"):
        run.run(source, smoke=False, out=tmp_path)
    run.run(source, smoke=False, out=tmp_path, parameters={"size": 2})
