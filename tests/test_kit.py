"""The instructor's kit: a report that measures, and an archive without solutions."""

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import nbformat
import pytest
from exercise_cells import code_cells, open_notebook
from helpers import ROOT

from hub import publish
from lessons import release, report
from lessons.build import KERNEL, exercise_sources, sources, write


def test_the_report_measures_and_keeps_what_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    (tmp_path / "report.json").write_text(
        json.dumps(
            {
                "01_x": {
                    "seconds": 60,
                    "memory_mb": 1,
                    "processes": 2,
                    "failed": True,
                    "size": "full",
                    "needs": [],
                    "when": "",
                }
            }
        )
    )
    monkeypatch.setattr(sys, "argv", ["report", "ex00_start"])
    assert report.main() == 0
    rows = json.loads((tmp_path / "report.json").read_text())
    assert set(rows) == {"01_x", "ex00_start"}
    row = rows["ex00_start"]
    assert not row["failed"] and row["seconds"] > 1 and row["memory_mb"] > 100 and row["processes"] >= 3
    page = (tmp_path / "index.html").read_text()
    assert "<td>ex00_start</td>" in page and "<td>failed</td>" in page


def test_a_notebook_that_fails_is_told_and_leaves_its_log(tmp_path, monkeypatch, capsys):
    name = "ex99_fails"
    place = tmp_path / "solutions" / name / f"{name}.ipynb"
    place.parent.mkdir(parents=True)
    place.write_text(
        write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")], metadata={"kernelspec": KERNEL}))
    )
    for what, value in {
        "ROOT": tmp_path,
        "FOLDER": tmp_path / "report",
        "exercise_sources": lambda: [tmp_path / "exercises" / f"{name}.py"],
        "needs": lambda source: ["nothing that would help"],
    }.items():
        monkeypatch.setattr(report, what, value)
    monkeypatch.setattr(sys, "argv", ["report", name])
    assert report.main() == 1
    assert f"{name} failed; see runs/report/{name}.log" in capsys.readouterr().err
    assert "ZeroDivisionError" in (tmp_path / "report" / f"{name}.log").read_text()
    assert json.loads((tmp_path / "report" / "report.json").read_text())[name]["failed"]
    assert f"<td>{name}</td><td>failed</td>" in (tmp_path / "report" / "index.html").read_text()


NEEDS = {  # first words of what the report says beside the folders of data
    "00_start": "MPI",
    "01_baseline": "",
    "05_launch": "Slurm MPI",
    "09_mpi": "MPI",
    "10_horovod": "Horovod MPI",  # and not Lightning, which its last line names as the next lesson
    "11_lightning": "Lightning",
    "12_rnn_digits": "Lightning",
    "13_bert_squad": "MiniLM Lightning",
    "ex04_ddp": "",
    "ex09_mpi": "MPI",
    "ex10_horovod": "",  # "no Horovod is needed"
    "ex11_lightning": "Lightning",
    "lab1_break_it": "",
    "lab3_break_it": "Linux",
}


def test_what_notebooks_need_is_read_from_their_code():
    found = {source.stem: report.needs(source) for source in (*sources(), *exercise_sources())}
    words = {
        name: " ".join(what.split()[0].strip(",") for what in rows if "/" not in what.split()[0])
        for name, rows in found.items()
    }
    assert {name: words[name] for name in NEEDS} == NEEDS
    assert "data/digits" in found["12_rnn_digits"] and "data/questions" in found["13_bert_squad"]


def test_the_archive_has_no_solution_and_can_be_built_from(tmp_path):
    archive = tmp_path / "course.tar.gz"
    count = release.pack(archive)
    first = archive.read_bytes()
    assert release.pack(archive) == count and archive.read_bytes() == first
    with tarfile.open(archive) as content:
        content.extractall(tmp_path, filter="data")
    course = tmp_path / "course"
    notebooks = [nbformat.read(path, as_version=4) for path in course.rglob("*.ipynb")]
    text = "\n\n".join(cell.source for notebook in notebooks for cell in notebook.cells)
    assert "BEGIN SOLUTION" not in text and "BEGIN HIDDEN" not in text
    assert not list(course.glob("solutions")) and not list(course.glob("lessons/exercises"))
    for source in exercise_sources():
        assert (course / "exercises" / source.stem / f"{source.stem}.ipynb").exists()
        for cell in code_cells(open_notebook("solutions", source.stem)):
            for answer in re.findall(r"### BEGIN SOLUTION\n(.+?)\n\s*### END SOLUTION", cell.source, re.S):
                assert answer not in text, f"{source.stem}: {answer}"
    pages = list(course.rglob("*.md"))
    assert {page.name for page in pages} >= {"README.md", "CONTRIBUTING.md"}
    for page in pages:
        assert "This is the learners' archive" in page.read_text()
        for path in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / path).exists(), f"{page.name} links to {path}, which is not in the archive"
    done = subprocess.run(
        [sys.executable, "-m", "lessons.build"], cwd=course, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr  # nothing to build, nothing removed


@pytest.fixture
def used(tmp_path, monkeypatch) -> Path:
    """A repository in which the instructor has solved an exercise, run a lesson, and kept a notebook of their own."""
    release.notebooks()  # of the real one
    repository = tmp_path / "repository"
    lesson = nbformat.read(ROOT / "notebooks" / "00_start.ipynb", as_version=4)
    code_cells(lesson)[0].outputs = [nbformat.v4.new_output("stream", text="an answer")]
    for name, text in {
        "README.md": "# Course\n\n[for teachers](lessons/TEACHING.md), [first](notebooks/00_start.ipynb)\n",
        "lessons/TEACHING.md": "# Giving it\n",
        "notebooks/00_start.ipynb": nbformat.writes(lesson),
        "exercises/ex00_start/ex00_start.ipynb": nbformat.writes(open_notebook("solutions", "ex00_start")),
        "exercises/ex00_start/mine.ipynb": nbformat.writes(open_notebook("solutions", "ex00_start")),
        "solutions/ex00_start/ex00_start.ipynb": "half a notebook",
    }.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    monkeypatch.setattr(release, "ROOT", repository)
    monkeypatch.setattr(publish, "ROOT", repository)
    return repository


FOR_LEARNERS = {"README.md", "notebooks/00_start.ipynb", "exercises/ex00_start/ex00_start.ipynb"}


def test_what_an_instructor_has_solved_or_run_is_neither_packed_nor_published(used, tmp_path, monkeypatch):
    release.pack(tmp_path / "course.tar.gz")
    with tarfile.open(tmp_path / "course.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.setattr(sys, "argv", ["publish", str(tmp_path / "srv")])
    assert publish.main() == 0
    for learners in (tmp_path / "course", tmp_path / "srv" / "learners"):
        assert {str(path.relative_to(learners)) for path in learners.rglob("*") if path.is_file()} == FOR_LEARNERS
        for name in FOR_LEARNERS - {"README.md"}:
            assert (learners / name).read_bytes() == (ROOT / name).read_bytes()
        assert "This is the learners' archive" in (learners / "README.md").read_text()
        assert "for teachers, [first](" in (learners / "README.md").read_text()
    teachers = tmp_path / "srv" / "teachers"
    assert "[for teachers](" in (teachers / "README.md").read_text()
    for name in ("exercises/ex00_start/ex00_start.ipynb", "solutions/ex00_start/ex00_start.ipynb"):
        assert (teachers / name).read_bytes() == (ROOT / name).read_bytes()


def test_publishing_removes_its_own_old_courses_and_nobody_elses(used, tmp_path):
    theirs = [tmp_path / name for name in ("learners-2025", "learners-old", "learners-9")]
    for folder in theirs:
        folder.mkdir()
    for _ in range(4):
        publish.publish(tmp_path / "learners", ["README.md"])
    assert all(folder.is_dir() for folder in theirs) and (tmp_path / "learners" / "README.md").exists()
    assert len(list(tmp_path.glob("learners-*"))) == len(theirs) + 2


def test_a_folder_without_git_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(release.UserError, match="is no git repository"):
        release.files()


def test_every_name_in_the_lesson_plan_exists():
    plan = (ROOT / "lessons" / "TEACHING.md").read_text()
    known = {source.stem[:2] for source in sources()} | {source.stem[:4] for source in exercise_sources()}
    for name in re.findall(r"\b(?:ex\d\d|lab\d)\b", plan):
        assert name in known, name
    for number, word in re.findall(r"\b(\d\d) (?!with\b|or\b|to\b)([a-z]+)", "\n".join(re.findall("(?m)^\\|.+", plan))):
        assert [source for source in sources() if source.stem.startswith(f"{number}_{word}")], f"{number} {word}"
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", plan):
        assert (ROOT / "lessons" / path).exists(), path
    for command in re.findall(r"`make ([a-z-]+)`", plan):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), command
