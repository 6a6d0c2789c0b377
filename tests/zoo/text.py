"""Sentences of this repository's LICENSE as padded batches, and two labels worth learning for every word.

A word is stored in lower case; `case` says how it was written and `mark` what followed it, so that restoring the
capitals and the punctuation of a text are the two tagging tasks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LICENSE = Path(__file__).parents[2] / "LICENSE"
PAD, CLS, IGNORED = 0, 1, -100
CASES = ("lower", "Title", "UPPER")
MARKS = ("", ",", ".", ":", ";")


@dataclass(frozen=True)
class Sentence:
    """Lower-case words, the index into CASES and into MARKS of each."""

    words: tuple[str, ...]
    case: tuple[int, ...]
    mark: tuple[int, ...]


def case_of(word: str) -> int:
    return 0 if word.islower() else 2 if len(word) > 1 and word.isupper() else 1


@functools.cache
def sentences(shortest: int = 5, longest: int = 31) -> tuple[Sentence, ...]:
    """Read the sentences of `shortest` words and more, cut after `longest`."""
    found = []
    for part in re.split(r"(?<=[.;:])\s", LICENSE.read_text()):
        pairs = re.findall(r"([A-Za-z][A-Za-z'-]*)[)\"]*([,.:;]?)", part)[:longest]
        if len(pairs) >= shortest:
            words, marks = zip(*pairs, strict=True)
            lower = tuple(word.lower() for word in words)
            found.append(Sentence(lower, tuple(map(case_of, words)), tuple(map(MARKS.index, marks))))
    return tuple(found)


@functools.cache
def vocabulary() -> dict[str, int]:
    """Number the words in alphabetical order after PAD and CLS."""
    words = sorted({word for sentence in sentences() for word in sentence.words})
    return {"[PAD]": PAD, "[CLS]": CLS} | {word: i for i, word in enumerate(words, start=2)}


def ids(sentence: Sentence) -> list[int]:
    return [vocabulary()[word] for word in sentence.words]


def padded(rows: Iterable[Sequence[int]], fill: int) -> Tensor:
    """Stack rows of different length to int64 [rows, longest]."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)


def batches(count: int, size: int) -> list[list[Sentence]]:
    """Deal out `count` batches of `size` sentences, spread over the text; the same ones at every call."""
    every = sentences()
    return [[every[(b + count * i) % len(every)] for i in range(size)] for b in range(count)]
