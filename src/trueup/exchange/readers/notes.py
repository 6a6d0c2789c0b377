"""What an import has to say: counted, for a dump may have the same thing to say of a million tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_KINDS = 200
"""Different sentences that are kept; what a hostile dump says beyond them is counted together."""
MAX_LENGTH = 160


@dataclass(slots=True)
class Notes:
    """Sentences with the number of times they apply and the first thing that they apply to."""

    _said: dict[str, list[int | str]] = field(default_factory=dict)
    _lost: dict[str, list[int | str]] = field(default_factory=dict)

    def say(self, sentence: str, example: str = "") -> None:
        """Note what a reader of the capture must know."""
        _count(self._said, sentence, example)

    def lose(self, sentence: str, example: str = "") -> None:
        """Note what the dump should hold and does not: such a capture is not whole."""
        _count(self._lost, sentence, example)

    @property
    def said(self) -> list[str]:
        """What was noted."""
        return [_line(sentence, *entry) for sentence, entry in self._said.items()]

    @property
    def lost(self) -> list[str]:
        """What was lost."""
        return [_line(sentence, *entry) for sentence, entry in self._lost.items()]


def _count(kept: dict[str, list[int | str]], sentence: str, example: str) -> None:
    sentence = _short(sentence)
    if sentence not in kept and len(kept) >= MAX_KINDS:
        sentence = "and more of other kinds"
    entry = kept.setdefault(sentence, [0, _short(example)])
    entry[0] = int(entry[0]) + 1


def _short(text: str) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text[: MAX_LENGTH + 1])
    return text if len(text) <= MAX_LENGTH else text[:MAX_LENGTH] + "…"


def _line(sentence: str, count: int | str, example: int | str) -> str:
    times = f" ({count:,} times, first: {example})" if example and int(count) > 1 else f": {example}" if example else ""
    return f"{sentence}{times}"
