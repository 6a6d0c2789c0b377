"""What Tab offers at the prompt: commands, their options, and names of calls and slots.

The names are read from the first step when first asked for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from trueup.doors.shell.prompt import commands
from trueup.doors.shell.session import SIDES, Session, Side
from trueup.foundation.model import LEVELS, PHASES, TrueupError

if TYPE_CHECKING:
    from trueup.foundation.store import Capture

MOST = 200  # proposals at a time
NAMES_READ = 200_000
SAFE = re.compile(r"[\w.:/#@$<>=+\[\]{}()~,*-]+")
"""Names that are offered: others (blanks, quotes, control characters) are reached by their seq."""
TAKES_CALL = ("ni",)
TAKES_SLOT = ("pt", "cp")
VALUES: dict[str, tuple[str, ...]] = {"-p": PHASES, "--phase": PHASES, "-g": LEVELS, "--level": LEVELS, "--side": SIDES}


class Names:
    """Names of one capture, by what a command wants; none of one that cannot be read."""

    def __init__(self, capture: Capture | None) -> None:
        self.slots: dict[str, list[str]] = {}
        self.types: set[str] = set()
        self.scopes: set[str] = set()
        if capture is None or not capture.steps or not capture.ranks:
            return
        names = ["scope", "op", "ordinal", "slot"]
        rows = capture.records(names, step=capture.steps[:1], rank=min(capture.ranks)).slice(0, NAMES_READ)
        columns = [rows[name].to_pylist() for name in names]
        for scope, op, ordinal, slot in zip(*columns, strict=True):
            name = f"{scope}/{op}#{ordinal}" if scope else f"{op}#{ordinal}"
            if slot is not None and SAFE.fullmatch(name):
                self.slots.setdefault(name, [])
                if slot not in self.slots[name] and SAFE.fullmatch(slot):
                    self.slots[name].append(slot)
                self.types.add(op)
                self.scopes.add(scope)
        self.scopes.discard("")


class ShellCompleter(Completer):
    """Completes the word before the cursor; what cannot be read offers nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known = commands()
        self._names: dict[str, Names] = {}

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:  # noqa: ARG002
        """Yield what may stand there."""
        text = document.text_before_cursor
        if not text or text[-1].isspace():
            word, before = "", text
        else:
            word = re.split(r"\s", text)[-1]
            before = text[: len(text) - len(word)]
        try:
            words = shlex.split(before)
        except ValueError:
            return
        for one in self._proposals(words, word):
            yield Completion(one, start_position=-len(word))

    def _proposals(self, words: list[str], word: str) -> Iterable[str]:
        if not words:
            return [name for name in self._known if name.startswith(word)]
        command = self._known.get(words[0])
        if command is None:
            return []
        if words[0] == "help":
            return [name for name in self._known if name.startswith(word)]
        if word.startswith("-"):
            options = [name for parameter in command.params for name in parameter.opts if name.startswith("-")]
            return sorted(name for name in [*options, "--help"] if name.startswith(word))
        if words[-1] in VALUES and words[0] != "run" and not (words[0] == "cp" and words[-1] == "-p"):
            return [value for value in VALUES[words[-1]] if value.startswith(word)]
        return self._names_for(words, word)

    def _names_for(self, words: list[str], word: str) -> Iterable[str]:
        side: Side = self._session.sides[0]
        for one in SIDES:
            if one in words or word.startswith(f"{one}:"):
                side = one
        names = self._of(side)
        if words[0] == "ls":
            return _near(names.types if words[-1] in ("-t", "--type", "-k") else names.scopes, word)
        if words[0] in TAKES_CALL:
            return _near(names.slots, word)
        if words[0] in TAKES_SLOT:
            lead = next((f"{one}:" for one in SIDES if word.startswith(f"{one}:")), "")
            call, colon, slot = word.removeprefix(lead).rpartition(":")
            if colon and call in names.slots:
                return [f"{lead}{call}:{one}" for one in names.slots[call] if one.startswith(slot)]
            return [f"{lead}{one}:" for one in _near(names.slots, word.removeprefix(lead))]
        return []

    def _of(self, side: Side) -> Names:
        path = str(self._session.path(side))
        if path not in self._names:
            try:
                self._names[path] = Names(self._session.capture(side))
            except (TrueupError, OSError):
                return Names(None)
        return self._names[path]


def _near(names: Iterable[str], word: str) -> list[str]:
    """Return the names that begin with a word, then those that contain it."""
    there = list(names)
    begin = [name for name in there if name.startswith(word)]
    inside = [name for name in there if word and word.lower() in name.lower() and not name.startswith(word)]
    return [*begin, *inside][:MOST]
