"""The instructor's kit: a report that measures, and an archive without solutions."""

import json
import re
import subprocess
import sys
import tarfile

import pytest
from exercise_cells import code_cells, open_notebook
from helpers import ROOT

from lessons import release, report
from lessons.build import exercise_sources, sources


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


def test_what_lessons_need_is_read_from_their_text():
    found = {source.stem: " ".join(report.needs(source)) for source in (*sources(), *exercise_sources())}
    assert "Slurm" in found["05_launch"] and "Slurm" not in found["01_baseline"]
    assert "Horovod" in found["10_horovod"] and "Horovod" not in found["04_ddp"]
    assert "data/digits" in found["12_rnn_digits"]


def test_the_archive_has_no_solution_and_can_be_built_from(tmp_path):
    archive = tmp_path / "course.tar.gz"
    count = release.pack(archive)
    first = archive.read_bytes()
    assert release.pack(archive) == count and archive.read_bytes() == first
    with tarfile.open(archive) as content:
        content.extractall(tmp_path, filter="data")
    course = tmp_path / "course"
    text = "\n".join(path.read_text() for path in course.rglob("*.ipynb"))
    assert "BEGIN SOLUTION" not in text and "BEGIN HIDDEN" not in text
    assert not list(course.glob("solutions")) and not list(course.glob("lessons/exercises"))
    for source in exercise_sources():
        assert (course / "exercises" / source.stem / f"{source.stem}.ipynb").exists()
        for cell in code_cells(open_notebook("solutions", source.stem)):
            for answer in re.findall(r"### BEGIN SOLUTION\n(.+?)\n\s*### END SOLUTION", cell.source, re.S):
                assert json.dumps(answer)[1:-1] not in text, f"{source.stem}: {answer}"
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
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", plan):
        assert (ROOT / "lessons" / path).exists(), path
    for command in re.findall(r"`make ([a-z-]+)`", plan):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), command
