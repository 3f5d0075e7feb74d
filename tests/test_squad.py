"""Questions and answers: tokens found by their characters, windows that lose nothing, scores by SQuAD's own definition."""

import json
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import squad_metrics
from course_lib.bert import make_small
from course_lib.config import Config, UserError
from course_lib.data import squad_files
from course_lib.data.squad import SquadDataset, align, cut, load_tokenizer
from course_lib.data.tasks import make_task
from course_lib.spans import LONGEST, best_spans, excerpt

TRICKY = [  # (context, the answer, which occurrence)
    ("Über den Straßen von Zürich lag der Nebel.", "Zürich", 0),
    ("Cafe\u0301 and café are one word,  with two   spaces.", "café", 0),  # the first é is an e and an accent
    ("Cafe\u0301 and café are one word,  with two   spaces.", "Cafe\u0301", 0),
    ("Cafe\u0301 and café are one word,  with two   spaces.", "two   spaces", 0),
    ("The bridge, built in 1870—not 1871—stands.", "1870", 0),
    ("(1870) 1870, “1870”: three times 1870.", "1870", 2),
    ("Paris is not Paris, Texas; Paris is Paris.", "Paris", 3),
    ("He paid $3.50 (not £3.50) at O'Neil's.", "O'Neil's", 0),
    ("He paid $3.50 (not £3.50) at O'Neil's.", "£3.50", 0),
    ("東京は日本の首都です。", "日本", 0),
    ("A zero\u200bwidth space and a\ttab\nand a line.", "tab\nand", 0),
    ("emoji 🙂 count 🙂🙂 as characters, not as bytes: 42", "42", 0),
]


def place(text: str, part: str, which: int) -> int:
    """Where the which-th occurrence of a part begins."""
    start = -1
    for _ in range(which + 1):
        start = text.index(part, start + 1)
    return start


def question(number: int, text: str, answers=(), **more) -> dict:
    shown = [{"text": answer, "answer_start": start} for answer, start in answers]
    return {"id": f"q{number}", "question": text, "answers": shown} | more


def write(path, paragraphs: list[tuple[str, list[dict]]], **more):
    entries = [{"context": context, "qas": asked} for context, asked in paragraphs]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": entries}]} | more), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tiny_bert):
    return load_tokenizer(tiny_bert)


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A tokenizer that knows every letter of the tricky texts, and some of their words."""
    texts = [context for context, _, _ in TRICKY]
    return load_tokenizer(make_small(tmp_path_factory.mktemp("letters") / "bert", texts, words=10))


@pytest.mark.parametrize("lower", [True, False])
def test_an_older_copy_of_bert_with_a_list_of_words_reads_the_same(tiny_bert, tokenizer, tmp_path, lower):
    known = tokenizer.get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(known, key=known.get)) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    text = "Which tool did Ann buy? A hammer, née saw."
    mine, its = (one.encode(text, add_special_tokens=False) for one in (load_tokenizer(tmp_path), tokenizer))
    assert mine.offsets == its.offsets if lower else mine.ids != its.ids
    assert (mine.ids == its.ids) == lower


def opened(path, tokenizer, **options) -> SquadDataset:
    return SquadDataset(squad_files.read(path), tokenizer, **options)


def pointed_at(dataset: SquadDataset, index: int) -> str:
    """The text that a window's target points at; "" for [CLS]."""
    first, last, number = dataset[index][1].tolist()
    assert number == index % len(dataset)
    return dataset.score.words(index, first, last) if last else ""


# ---- from characters to tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context, answer, which", TRICKY)
def test_the_tokens_of_an_answer_are_its_characters(context, answer, which, letters):
    places = np.array(letters.encode(context, add_special_tokens=False).offsets)
    start = place(context, answer, which)
    first, last = align(places, start, start + len(answer))
    assert excerpt(context, places[first, 0], places[last, 1]) == answer
    assert places[first, 0] == start


def test_every_generated_answer_is_found_to_the_letter(errands, tokenizer):
    dataset = opened(errands / "train.json", tokenizer, tokens=64, stride=16)
    found = {}
    for index in range(len(dataset)):
        found.setdefault(int(dataset.windows[index, 0]), set()).add(pointed_at(dataset, index))
    for number, asked in enumerate(dataset.squad.questions):
        right = {text for text, _ in asked.answers} or {""}
        assert found[number] - {""} == right - {""}, asked
    assert len(dataset) > len(dataset.squad.questions)  # some needed several windows


@given(st.text(max_size=60), st.integers(0, 60), st.integers(1, 20))
@settings(max_examples=200)
def test_aligned_tokens_touch_the_answer_and_no_others_do(letters, text, start, length):
    """Any text at all, any piece of it: exactly the tokens that share a character with the piece."""
    stop = min(start + length, len(text))
    places = np.array(letters.encode(text, add_special_tokens=False).offsets).reshape(-1, 2)
    if start < stop and len(places):
        first, last = align(places, start, stop)
        touching = [n for n, (begin, end) in enumerate(places.tolist()) if begin < stop and end > start]
        assert list(range(first, last + 1)) == touching


# ---- windows ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(1, 60), st.integers(0, 59))
def test_windows_see_everything_and_no_short_answer_is_always_cut(length, room, stride):
    stride = min(stride, room - 1)
    begins = cut(length, room, stride)
    spans = [(begin, min(begin + room, length)) for begin in begins]
    assert {token for begin, end in spans for token in range(begin, end)} == set(range(length))
    assert all(second - first == room - stride for first, second in zip(begins, begins[1:]))
    assert spans[-1][1] == length and all(
        end < length for _, end in spans[:-1]
    )  # the last reaches the end, none before
    for first in range(length - stride):  # an answer of at most stride + 1 tokens is whole somewhere
        assert any(begin <= first and first + stride < end for begin, end in spans)


def test_windows_are_those_of_transformers_own_tokenizer(errands, tiny_bert, tokenizer):
    """Token for token, for every question: special tokens, masks, types, overlaps."""
    from transformers import BertTokenizerFast

    theirs = BertTokenizerFast(tokenizer_file=str(tiny_bert / "tokenizer.json"))
    dataset = opened(errands / "valid.json", tokenizer, tokens=64, stride=16)
    texts = [[asked.text for asked in dataset.squad.questions]]
    texts.append([dataset.squad.contexts[asked.paragraph] for asked in dataset.squad.questions])
    options = {"truncation": "only_second", "max_length": 64, "stride": 16, "padding": "max_length"}
    encoded = theirs(*texts, **options, return_overflowing_tokens=True, return_tensors="pt")
    names = ("input_ids", "attention_mask", "token_type_ids")
    expected = torch.stack([encoded[name] for name in names], dim=1)
    assert torch.equal(torch.stack([x for x, _ in dataset]), expected)
    assert len(dataset) > 2 * len(dataset.squad.questions)


def test_an_answer_that_a_window_cuts_off_is_pointed_at_where_it_is_whole(tmp_path, letters):
    """Wherever it stands: at the very beginning, at borders of windows, at the very end; and never to half of it."""
    words = [f"{chr(97 + n % 26)}{'xyz'[n // 26]}" for n in range(60)]  # two letters each, two tokens
    context = " ".join(words)
    asked = [question(n, "a ?", [(word, context.index(word))]) for n, word in enumerate(words)]
    dataset = opened(write(tmp_path / "train.json", [(context, asked)]), letters, tokens=20, stride=5)
    seen = {}
    for index in range(len(dataset)):
        seen.setdefault(int(dataset.windows[index, 0]), []).append(pointed_at(dataset, index))
    for number, word in enumerate(words):
        assert set(seen[number]) == {"", word}, word


def test_samples_are_what_bert_reads(tmp_path, letters):
    context = "Paris is not Paris, Texas; Paris is Paris."
    start = place(context, "Paris", 2)
    path = write(tmp_path / "valid.json", [(context, [question(0, "Paris?", [("Paris", start)])])])
    dataset = opened(path, letters, tokens=60, stride=8)
    [(x, y)] = list(dataset)
    assert x.shape == (3, 60) and x.dtype == y.dtype == torch.int64
    tokens = [letters.id_to_token(int(number)) for number in x[0]]
    first, second = (n for n, token in enumerate(tokens) if token == "[SEP]")
    assert tokens[0] == "[CLS]" and set(tokens[second + 1 :]) == {"[PAD]"}
    assert x[1].tolist() == [1] * (second + 1) + [0] * (59 - second)
    assert x[2].tolist() == [0] * (first + 1) + [1] * (second - first) + [0] * (59 - second)
    assert pointed_at(dataset, 0) == "Paris" and dataset.windows.shape == (1, 3)
    with pytest.raises(IndexError):
        dataset[1]


def test_it_travels_to_workers(errands, tokenizer):
    dataset = opened(errands / "valid.json", tokenizer)
    again = pickle.loads(pickle.dumps(dataset))
    assert len(again) == len(dataset)
    assert all(torch.equal(a, b) for pair in zip(dataset, again) for a, b in zip(*pair))


# ---- files -----------------------------------------------------------------------------------------------------------------


def test_both_versions_of_squads_own_files_load(tmp_path, tiny_bert):
    old = [question(0, "who?", [("Ann", 0)])]
    several = [question(0, "who?", [("Ann", 0), ("Ann", 0), ("Ann met Bob", 0)])]
    none = question(1, "where?", plausible_answers=[{"text": "Bob", "answer_start": 8}], is_impossible=True)
    for version, train, valid in (("v1.1", old, several), ("v2.0", [*old, none], [*several, none])):
        folder = tmp_path / version
        folder.mkdir()
        write(folder / f"train-{version}.json", [("Ann met Bob.", train)], version=version)
        write(folder / f"dev-{version}.json", [("Ann met Bob.", valid)], version=version)
        task = make_task(Config(task="squad", data=str(folder), pretrained=str(tiny_bert), tokens=40, stride=8))
        assert len(task.train) == len(task.valid) == len(train)
        assert [text for text, _ in task.valid.squad.questions[0].answers] == ["Ann", "Ann met Bob"]
        assert task.score.may_be_empty == (version == "v2.0")
        assert pointed_at(task.train, 0) == "Ann"
    assert pointed_at(task.valid, 1) == "" and task.valid.squad.questions[1].answers == ()


def test_mistakes_in_files_are_named(tmp_path):
    with pytest.raises(
        UserError, match="has none of train.json, train-v1.1.json, train-v2.0.json; python -m course_lib"
    ):
        squad_files.find(tmp_path, "train")
    path = write(tmp_path / "train-v1.1.json", [("Ann met Bob.", [question(7, "who?", [("Bob", 0)])])])
    (tmp_path / "train-v2.0.json").write_text("{}")
    with pytest.raises(UserError, match="has both train-v1.1.json and train-v2.0.json: keep each version"):
        squad_files.find(tmp_path, "train")
    with pytest.raises(
        UserError, match=r"train-v1.1.json: the answer 'Bob' of question 'q7' is not where answer_start"
    ):
        squad_files.read(path)
    for text, told in [
        (path.read_text()[:-9], "can't be read as JSON"),
        ("[1]", "is not in SQuAD's format"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "it has no 'context'"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 3}]}]}]}', "last question: 3"),
        ('{"data": []}', "has no questions"),
    ]:
        path.write_text(text)
        with pytest.raises(UserError, match=told) as error:
            squad_files.read(path)
        assert path.name in str(error.value) and "\n" not in str(error.value)
    write(path, [("Ann met Bob.", [question(1, "who?")])])
    with pytest.raises(UserError, match="without an answer, and without is_impossible; last question: 'q1'"):
        squad_files.read(path)


def test_a_rare_flaw_is_left_out_with_a_word(tmp_path, capsys):
    asked = [question(number, "who?", [("Ann", 0)]) for number in range(200)]
    asked[50] = question(50, "who?", [("Bob", 1)])
    found = squad_files.read(write(tmp_path / "train.json", [("Ann met Bob.", asked)]))
    assert [one.name for one in found.questions] == [f"q{n}" for n in range(200) if n != 50]
    assert "1 of 200 questions left out: the answer 'Bob' of question 'q50'" in capsys.readouterr().err


def test_a_question_that_fills_the_window_is_named(tmp_path, tokenizer):
    path = write(tmp_path / "train.json", [("Ann met Bob.", [question(3, "who " * 40, [("Ann", 0)])])])
    with pytest.raises(UserError, match=r"train.json: question 'q3' has \d+ tokens .* raise --tokens 64 or lower"):
        opened(path, tokenizer, tokens=64, stride=16)


@pytest.mark.parametrize("content, told", [(None, "can't be read"), ("{}", "can't be read")])
def test_a_folder_without_a_tokenizer(tmp_path, content, told):
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=rf"--pretrained .*tokenizer.json {told}.*--real minilm makes such a folder"):
        load_tokenizer(tmp_path)


# ---- exact match and F1 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found, right, exact, f1",
    [
        ("The Beatles", "beatles!", 1, 1),  # case, article, punctuation
        ("a  cat", "An cat", 1, 1),
        ("theatre", "atre", 0, 0),  # an article is a word, not a part of one
        ("U.S.", "US", 1, 1),
        ("don't", "dont", 1, 1),
        ("well-known", "wellknown", 1, 1),
        ("well-known", "well known", 0, 0),
        ("Zürich", "Zurich", 0, 0),  # accents count
        ("‘Ann’", "Ann", 0, 0),  # only ASCII's punctuation goes
        ("42,000 people", "42000", 0, 2 / 3),
        ("to be or not to be", "to be", 0, 2 * 2 / 8),  # each word as often as it is in both
        ("to be", "to to to", 0, 2 * 1 / 5),
        ("", "", 1, 1),
        ("the", "", 1, 1),  # nothing is left of it
        ("", "cat", 0, 0),
        ("cat", "", 0, 0),
        ("the", "cat", 0, 0),
    ],
)
def test_answers_are_compared_as_squad_defines_it(found, right, exact, f1):
    for pair in ((found, right), (right, found)):
        assert squad_metrics.exact(*pair) == exact
        assert squad_metrics.f1(*pair) == pytest.approx(f1)


def test_the_best_of_several_right_answers_counts():
    assert squad_metrics.best(squad_metrics.f1, "in May 1870", ["1870", "May 1870", "then"]) == pytest.approx(4 / 5)
    assert squad_metrics.best(squad_metrics.exact, "", []) == 1 == squad_metrics.best(squad_metrics.f1, "the", ["the"])
    assert squad_metrics.best(squad_metrics.exact, "Bob", []) == 0


# ---- from logits to a score ------------------------------------------------------------------------------------------------


@pytest.fixture
def judged(errands, tokenizer):
    """Held-out questions in many windows, with what some net might have said about them."""
    dataset = opened(errands / "valid.json", tokenizer, tokens=64, stride=16)
    torch.manual_seed(0)
    return dataset, torch.randn(len(dataset), 2, 64), torch.stack([y for _, y in dataset])


def test_the_best_span_is_the_best_of_all_that_are_allowed():
    torch.manual_seed(0)
    logits = torch.randn(5, 2, 70)
    begin, end = torch.tensor([1, 5, 30, 60, 2]), torch.tensor([70, 6, 64, 70, 50])
    for row, found in enumerate(best_spans(logits, begin, end).tolist()):
        start, stop = logits[row].double()
        spans = [
            ((start[i] + stop[j]).item(), i, j)
            for i in range(begin[row], end[row])
            for j in range(i, min(i + LONGEST, end[row]))
        ]
        assert found[:3] == list(max(spans)) and found[3] == pytest.approx((start[0] + stop[0]).item())


def test_sums_over_any_partition_are_those_of_all_at_once(judged):
    """Batches of any size, in any order, on any rank: the same loss, exact match and F1."""
    dataset, logits, y = judged
    whole = dataset.score.result(dataset.score.sums(logits, y).tolist())
    order = list(range(len(dataset)))
    random.Random(1).shuffle(order)
    cuts = [0, 1, 4, 5, 11, len(order)]
    parts = [torch.tensor(order[a:b]) for a, b in zip(cuts, cuts[1:])]
    total = sum(dataset.score.sums(logits[part], y[part]) for part in parts)
    again = dataset.score.result(total.tolist())
    assert again["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert {name: again[name] for name in ("exact", "f1", "count")} == {
        name: whole[name] for name in ("exact", "f1", "count")
    }
    assert whole["count"] == len(dataset) and 0 < whole["f1"] < 1
    twice = total + dataset.score.sums(logits[:3], y[:3])  # as samplers do that fill up the last batch
    assert dataset.score.result(twice.tolist())["f1"] == whole["f1"]


def test_a_net_that_points_at_the_right_tokens_is_always_right(judged):
    dataset, _, y = judged
    logits = torch.zeros(len(dataset), 2, 64)
    for row, (first, last, _) in enumerate(y.tolist()):
        sure = 9.0 if last else 3.0  # of an answer more than of none
        logits[row, 0, first], logits[row, 1, last] = sure, sure
    found = dataset.score.result(dataset.score.sums(logits, y).tolist())
    assert found["exact"] == found["f1"] == 1
    silent = torch.zeros_like(logits)
    silent[:, :, 0] = 9.0  # always [CLS]: right where there is no answer
    found = dataset.score.result(dataset.score.sums(silent, y).tolist())
    share = sum(not asked.answers for asked in dataset.squad.questions) / len(dataset.squad.questions)
    assert found["exact"] == found["f1"] == share > 0


def test_without_unanswerable_questions_an_answer_is_always_given(tmp_path, tokenizer):
    """SQuAD 1.1: [CLS] is no choice there."""
    path = write(tmp_path / "dev-v1.1.json", [("Ann met Bob.", [question(0, "who?", [("Ann", 0)])])])
    dataset = opened(path, tokenizer, tokens=40)
    logits = torch.zeros(1, 2, 40)
    logits[:, :, 0] = 9.0
    first, last, _ = dataset[0][1].tolist()
    logits[0, 0, first] = logits[0, 1, last] = 1.0
    assert dataset.score.answers(dataset.score.sums(logits, dataset[0][1][None]).tolist()) == {0: "Ann"}


def test_loss_is_the_mean_of_both_cross_entropies(judged):
    dataset, logits, y = judged
    by_hand = [
        -(logits[row, side].log_softmax(0)[y[row, side]]).item() for row in range(len(dataset)) for side in range(2)
    ]
    assert dataset.score.loss(logits, y).item() == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)
    parts = [dataset.score.loss(logits[part], y[part]).item() for part in (slice(0, 4), slice(4, 8))]
    assert dataset.score.loss(logits[:8], y[:8]).item() == pytest.approx(sum(parts) / 2, rel=1e-5)
