"""A BERT that answers questions: it reads a question and a text, and points at the first and the last token of the answer."""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from course_lib.config import UserError

MAKE = "python -m course_lib.data.make --real minilm makes such a folder"


class Reader(nn.Module):
    """(batch, 3, token) → (batch, 2, token): logits of the first and of the last token.

    The weights come from a folder, never from a hub; the head is new, and differs with torch's seed alone.
    """

    def __init__(self, pretrained: str | Path, *, fresh: bool = False):
        super().__init__()
        with _quiet() as transformers:
            settings = _settings(transformers, pretrained)
            kind = transformers.AutoModelForQuestionAnswering
            if fresh:  # the same net, but it has never read anything
                self.bert = kind.from_config(settings)
            else:
                try:
                    options = {"local_files_only": True, "dtype": torch.float32, "output_loading_info": True}
                    self.bert, found = kind.from_pretrained(pretrained, config=settings, **options)
                except Exception as error:  # each format of weights has errors of its own
                    reason = str(error).strip().splitlines()[0]
                    raise UserError(
                        f"--pretrained {pretrained}: its weights can't be read ({reason}); {MAKE}"
                    ) from error
                if missing := [name for name in found["missing_keys"] if not name.startswith("qa_outputs")]:
                    raise UserError(f"--pretrained {pretrained}: its weights have no {min(missing)}; {MAKE}")
                self.bert.train()  # as every new module; they come ready for use

    @property
    def layers(self) -> nn.ModuleList:
        """What FSDP shares out one by one."""
        return self.bert.base_model.encoder.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, mask, types = x.unbind(dim=1)
        found = self.bert(input_ids=ids, attention_mask=mask, token_type_ids=types)
        return torch.stack([found.start_logits, found.end_logits], dim=1)


def _settings(transformers, folder: str | Path):
    """The folder's config.json, without dropout: two ranks would draw other numbers than one process with both batches."""
    if not (Path(folder) / "config.json").is_file() or not str(folder):
        raise UserError(f"--pretrained {str(folder) or '(empty)'} must be a folder with a BERT's config.json; {MAKE}")
    try:
        settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/config.json can't be read ({str(error).splitlines()[0]}); {MAKE}") from error
    if settings.model_type != "bert":
        raise UserError(f"--pretrained {folder} holds a {settings.model_type}, and only BERTs are known here; {MAKE}")
    settings.hidden_dropout_prob = settings.attention_probs_dropout_prob = 0.0
    return settings


@contextmanager
def _quiet():
    """transformers, without its bars, and without its remark that the head is new: we know."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when it is imported
    import transformers
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def make_small(folder: Path, texts: Sequence[str], *, width: int = 32, layers: int = 2, words: int = 2000) -> Path:
    """Write a small BERT that has learned nothing, with a tokenizer for these texts: where no other is to be had."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    counts = Counter(
        word
        for text in texts
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
    )
    letters = sorted({letter for word in counts for letter in word})
    common = sorted(counts, key=lambda word: (-counts[word], word))[:words]
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), *common]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(known))}
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer.add_special_tokens(known[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    with _quiet() as transformers:
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        settings = transformers.BertConfig(vocab_size=len(vocabulary), num_attention_heads=4, **sizes)
        transformers.BertForQuestionAnswering(settings).save_pretrained(folder)
    return folder
