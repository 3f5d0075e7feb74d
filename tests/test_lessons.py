"""Every lesson runs from top to bottom at smoke size, and its numbers stay where they were."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from helpers import REACHED_BY

from lessons import build, run

LESSONS = build.sources()
SLURM = [source for source in LESSONS if "jobs.find_cluster()" in source.read_text()]
pytestmark = pytest.mark.timeout(1200)  # a lesson starts many ranks, and its neighbour too


@pytest.fixture
def run_and_compare(tmp_path, monkeypatch) -> Callable:
    """Run a lesson in a folder of its own; its numbers are those of the baseline."""
    monkeypatch.setenv("COURSE_PLAIN", "1")  # run() sets it for good, and other tests follow in this process

    def one(source: Path, **parameters) -> str:
        numbers = run.run(source, smoke=True, out=tmp_path, parameters={"runs": str(tmp_path / "runs")} | parameters)
        baseline = json.loads((run.BASELINES / f"{source.stem}.json").read_text())
        assert not (complaints := run.compare(numbers, baseline)), "\n".join(complaints)
        return (tmp_path / f"{source.stem}.ipynb").read_text()

    return one


@pytest.mark.integration
@pytest.mark.parametrize("source", SLURM, ids=lambda source: source.stem)
def test_lesson_with_jobs_runs_on_slurm(source, slurm, run_and_compare):
    run_and_compare(source)


@pytest.mark.parametrize("source", SLURM, ids=lambda source: source.stem)
def test_lesson_with_jobs_has_the_same_numbers_without_slurm(source, no_slurm, run_and_compare):
    assert "not run here, but recorded" in run_and_compare(source)


def test_the_lesson_on_horovod_has_the_same_numbers_without_it(run_and_compare):
    [source] = [one for one in LESSONS if one.stem == "10_horovod"]
    assert "not run here, but recorded" in run_and_compare(source, horovod=False)


def test_the_lesson_on_bert_has_the_same_numbers_without_minilm(run_and_compare, tmp_path):
    [source] = [one for one in LESSONS if one.stem == "13_bert_squad"]
    assert "not run here, but recorded" in run_and_compare(source, pretrained=str(tmp_path / "nothing"))


@pytest.mark.parametrize("source", [one for one in LESSONS if one not in SLURM], ids=lambda source: source.stem)
def test_lesson_runs_and_keeps_its_numbers(source, run_and_compare):
    run_and_compare(source)


def test_notebooks_are_built_from_their_sources(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["build", "--check"])
    assert build.main() == 0, capsys.readouterr().err


def test_every_link_of_a_notebook_leads_somewhere():
    found = [
        (path, link)
        for path, text in build.wanted_files().items()
        for cell in nbformat.reads(text, as_version=4).cells
        if cell.cell_type == "markdown"
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", cell.source)
    ]
    assert len(found) > 40
    assert [(path.name, link) for path, link in found if not (path.parent / link).exists()] == []


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


def test_programs_that_join_the_other_ranks_also_leave_them():
    """One that just ends is now and then killed by signal 6: gloo's threads outlive what they work on."""
    cells = [cell.source for source in LESSONS for cell in nbformat.reads(build.build(source), as_version=4).cells]
    programs = [cell for cell in cells if cell.startswith("%%writefile")]
    programs += [path.read_text() for path in (build.ROOT / "lessons" / "programs").glob("*.py")]
    joining = [one for one in programs if "world = start(" in one or "DistributedDataParallel(" in one]
    assert len(joining) > 1 and all("\nstop(world)" in program for program in joining)


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


def test_its_kernel_has_no_port_that_another_program_could_take(tmp_path):
    source = tmp_path / "00_ports.py"
    source.write_text(
        f"# %%\n{REACHED_BY}\nfrom course_lib.lesson import numbers\nnumbers(files=reached_by == 'ipc')\n"
    )
    assert run.run(source, smoke=False, out=tmp_path) == {"files": 1}


def test_a_failing_cell_fails_the_run(tmp_path):
    source = tmp_path / "00_broken.py"
    source.write_text('# %% tags=["parameters"]\nsize = 1\n\n# %%\nassert size == 2, "size is wrong"\n')
    with pytest.raises(run.papermill.PapermillExecutionError, match="size is wrong"):
        run.run(source, smoke=False, out=tmp_path)
    run.run(source, smoke=False, out=tmp_path, parameters={"size": 2})
