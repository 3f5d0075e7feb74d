"""Question answering: which words of a paragraph answer the question? A BERT reads both and points at the first and the last.

BERT reads at most so many tokens at once, so a long paragraph becomes several windows that overlap. Each window is a sample:

    [CLS] question [SEP] part of the paragraph [SEP] [PAD] …

An answer that is whole in the window is pointed at; else (cut off, elsewhere, or there is none) both point to [CLS].
"""

import json
import math
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from course_lib.config import Config, UserError
from course_lib.data.squad_files import Squad, find, read
from course_lib.spans import Spans

SPECIAL = ("[CLS]", "[SEP]", "[PAD]")


def load_tokenizer(folder: str | Path):
    """The tokenizer of a BERT's folder: text → tokens, and where in the text each of them stands."""
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    try:
        words_alone = not file.exists() and (Path(folder) / "vocab.txt").exists()
        tokenizer = _from_words(Path(folder)) if words_alone else Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise UserError(
            f"--pretrained {folder or '(empty)'}: tokenizer.json can't be read ({error}); "
            "python -m course_lib.data.make --real minilm makes such a folder"
        ) from error
    if missing := [token for token in SPECIAL if tokenizer.token_to_id(token) is None]:
        raise UserError(f"{file} has no token {missing[0]}: it is not BERT's")
    tokenizer.no_truncation()  # some files ask for it, and windows are ours to cut
    tokenizer.no_padding()
    return tokenizer


def _from_words(folder: Path):
    """Older copies of BERT have a list of words, and a word about capitals."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    settings = folder / "tokenizer_config.json"
    lower = json.loads(settings.read_text()).get("do_lower_case", True) if settings.exists() else True
    tokenizer = Tokenizer(models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def places_of(folder: str | Path) -> float:
    """How many tokens a BERT can read at once: it knows so many places."""
    try:
        return int(json.loads((Path(folder) / "config.json").read_text())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):  # the net itself will say what is wrong with that file
        return math.inf


class Tokens:
    """Texts as tokens, side by side in arrays: of the i-th text those from bounds[i] to bounds[i + 1]."""

    def __init__(self, texts: list[str], tokenizer, *, offsets: bool):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one thread a rank, and it must not warn when forked
        encoded = (
            one
            for first in range(0, len(texts), 1000)  # their objects are large: never all at once
            for one in tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False)
        )
        pieces = [(np.array(one.ids, np.int32), np.array(one.offsets, np.int32).reshape(-1, 2)) for one in encoded]
        self.bounds = np.cumsum([0, *(len(ids) for ids, _ in pieces)])
        self.ids = np.concatenate([ids for ids, _ in pieces])
        if offsets:  # (token, 2): first character, and the one after the last
            self.offsets = np.concatenate([places for _, places in pieces])

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[self.bounds[index] : self.bounds[index + 1]]

    def places(self, index: int) -> np.ndarray:
        """Where the tokens of a text stand in it: (token, 2)."""
        return self.offsets[self.bounds[index] : self.bounds[index + 1]]


def align(places: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The first and the last token that share a character with text[start:stop]; first > last: there is none."""
    first = np.searchsorted(places[:, 1], start, side="right")  # of those that end after its start
    last = np.searchsorted(places[:, 0], stop, side="left") - 1  # of those that begin before its end
    return int(first), int(last)


def cut(length: int, room: int, stride: int) -> list[int]:
    """Where windows of `room` tokens begin, each with the last `stride` of the one before, until all `length` are seen."""
    return list(range(0, max(1, length - stride), room - stride))


class SquadDataset(Dataset):
    """[i] → (x, y), int64. x: (3, tokens): token ids, 1 where there are any, 0 in the question and 1 in the paragraph.

    y: (3,): first and last token of the answer, and the number of the window.
    """

    def __init__(self, squad: Squad, tokenizer, *, tokens: int = 128, stride: int = 32):
        self.squad, self.length = squad, tokens
        self.cls, self.sep, self.pad = (tokenizer.token_to_id(token) for token in SPECIAL)
        self.contexts = Tokens(squad.contexts, tokenizer, offsets=True)
        self.questions = Tokens([question.text for question in squad.questions], tokenizer, offsets=False)
        windows, targets = [], []  # (question, first token of the paragraph, one after the last); (first, last)
        for number, question in enumerate(squad.questions):
            before = len(self.questions[number]) + 2  # [CLS] and [SEP]
            places = self.contexts.places(question.paragraph)
            room = tokens - before - 1
            if room <= stride:
                raise UserError(
                    f"{squad.path}: question {question.name!r} has {before - 2} tokens and leaves no room for new text in "
                    f"a window; raise --tokens {tokens} or lower --stride {stride}"
                )
            first, last = self._answer(question, places)
            for begin in cut(len(places), room, stride):
                end = min(begin + room, len(places))
                windows.append((number, begin, end))
                inside = begin <= first <= last < end
                targets.append((before + first - begin, before + last - begin) if inside else (0, 0))
        self.windows, self.targets = np.array(windows, np.int32), np.array(targets, np.int32)
        begins = [len(self.questions[number]) + 2 for number in self.windows[:, 0]]
        self.score = Spans(squad, self.contexts, self.windows, begins)

    @classmethod
    def open(cls, config: Config, part: str) -> "SquadDataset":
        """A part of --data, cut up by the tokenizer in --pretrained."""
        tokenizer = load_tokenizer(config.pretrained)
        if config.tokens > (most := places_of(config.pretrained)):
            raise UserError(
                f"--tokens {config.tokens} is more than the {most} that --pretrained {config.pretrained} can read"
            )
        return cls(read(find(config.data, part)), tokenizer, tokens=config.tokens, stride=config.stride)

    @staticmethod
    def _answer(question, places: np.ndarray) -> tuple[int, int]:
        """The tokens of the first right answer; (-1, -1): there are none."""
        if not question.answers:
            return -1, -1
        text, start = question.answers[0]
        return align(places, start, start + len(text))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index} of {len(self)} windows")
        index %= len(self)
        number, begin, end = self.windows[index]
        asked = self.questions[number]
        text = self.contexts[self.squad.questions[number].paragraph][begin:end]
        before, used = len(asked) + 2, len(asked) + len(text) + 3
        x = np.zeros((3, self.length), np.int64)
        x[0] = self.pad
        x[0, :used] = [self.cls, *asked, self.sep, *text, self.sep]
        x[1, :used] = 1
        x[2, before:used] = 1
        return torch.from_numpy(x), torch.tensor([*self.targets[index].tolist(), index])
