"""Sixteen sentences with named entities, written for this example: words and BIO tags of persons, places and organisations."""

from __future__ import annotations

import torch
from torch import Tensor

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
PAD = 0

SENTENCES = (
    "Marta|PER Lindqvist|+ flew from Oslo|LOC to Cape|LOC Town|+ on Friday .",
    "The board of Halden|ORG Paper|+ Mills|+ met in Bergen|LOC yesterday .",
    "Joao|PER Pereira|+ joined Northwind|ORG Energy|+ as an engineer .",
    "Rain fell over Lake|LOC Geneva|+ while the ferries kept their timetable and nobody in Lausanne|LOC seemed to mind .",
    "A spokesman for Kestrel|ORG Airlines|+ said that two flights to Nairobi|LOC were late .",
    "Aiko|PER Tanaka|+ and Samuel|PER Osei|+ wrote the report for the city of Rotterdam|LOC .",
    "Prices rose again in March , said the Bank|ORG of|+ Meridia|+ .",
    "Professor Ines|PER Calder|+ teaches statistics at Lund|ORG University|+ in the south of Sweden|LOC .",
    "The river Tagus|LOC reaches the sea near Lisbon|LOC .",
    "Copperfield|ORG Labs|+ opened an office in Tallinn|LOC and hired Mikk|PER Saar|+ to lead it .",
    "Nobody answered the telephone .",
    "In Kyoto|LOC , Elena|PER Rossi|+ photographed temples for a month before she returned to Turin|LOC with many pictures .",
    "Union leaders at Vega|ORG Steel|+ asked for talks with Peter|PER Novak|+ .",
    "The train to Vienna|LOC leaves at noon .",
    "Harbor|ORG Trust|+ and the Museum|ORG of|+ Tides|+ signed a contract in San|LOC Remo|+ , Italy|LOC .",
    "Grace|PER Adeyemi|+ won the race ahead of Tom|PER Whitlock|+ .",
)


def tagged(sentence: str) -> tuple[list[str], list[str]]:
    """Split a sentence into words and tags: ``Oslo|LOC`` begins an entity, ``Town|+`` goes on with it."""
    words, tags, kind = [], [], ""
    for part in sentence.split():
        word, _, mark = part.partition("|")
        kind = mark if mark not in ("", "+") else kind if mark == "+" else ""
        words.append(word)
        tags.append("O" if not kind else f"{'I' if mark == '+' else 'B'}-{kind}")
    return words, tags


def vocabulary() -> dict[str, int]:
    """Number the words in lower case; 0 is padding."""
    words = sorted({word.lower() for sentence in SENTENCES for word in tagged(sentence)[0]})
    return {word: number for number, word in enumerate(words, start=1)}


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids ``(n, t)``, tags ``(n, t)`` and which places hold a word ``(n, t)``."""
    numbers = vocabulary()
    chosen = [tagged(SENTENCES[(step * size + k) % len(SENTENCES)]) for k in range(size)]
    longest = max(len(words) for words, _ in chosen)
    ids, tags = torch.full((size, longest), PAD), torch.zeros(size, longest, dtype=torch.long)
    for row, (words, marks) in enumerate(chosen):
        ids[row, : len(words)] = torch.tensor([numbers[word.lower()] for word in words])
        tags[row, : len(marks)] = torch.tensor([TAGS.index(mark) for mark in marks])
    return ids, tags, ids != PAD
