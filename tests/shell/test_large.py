"""A capture of 120,000 rows: what a shell reads at its start, and for each command, is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.test_large import large as large
from cli.test_large import read as read

from .conftest import MakeShell


def test_nothing_is_read_at_the_start_and_little_later(
    shell: MakeShell, large: Path, read: list[tuple[int, int, set[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    from trueup.doors.shell import session

    real = session.open_capture
    monkeypatch.setattr(session, "open_capture", lambda path: opened.append(path) or real(path))
    run = shell(large)
    run("help")
    assert not opened
    assert not read
    run("ls")
    assert {name for _, _, names in read for name in names} == {"rank", "step", "seq", "op"}
    del read[:]
    run("ls -n layers.3 -l 2 --step 17")
    assert {step for step, _, _ in read} == {17}
    del read[:]
    run("ni layers.7.attn/torch.matmul#3 --step 5")
    assert {step for step, _, _ in read} <= {4, 5}
    del read[:]
    run("pt 7:output.0 --step 0")
    assert {step for step, _, _ in read} == {0}
    assert len(opened) == 1


def test_completion_reads_one_step(large: Path, read: list[tuple[int, int, set[str]]], shell: MakeShell) -> None:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    from trueup.doors.shell.completion import ShellCompleter

    completer = ShellCompleter(shell(large).session)

    def offered(text: str) -> list[str]:
        return [one.text for one in completer.get_completions(Document(text), CompleteEvent())]

    assert offered("v") == ["vc", "vcs"]
    assert offered("vcs -") == sorted(["-f", "--file", "-c", "--cosine", "-l", "--limit", "--help"])
    assert not read
    assert offered("ni layers.7.attn/torch.matmul#3")[0] == "layers.7.attn/torch.matmul#3"
    assert offered("ni 47.ATTN")[0] == "layers.47.attn/torch.matmul#0"
    assert {step for step, _, _ in read} == {0}
    assert {name for _, _, names in read for name in names} <= {"scope", "op", "ordinal", "slot", "rank", "step", "seq"}
    assert offered("pt base:layers.7.attn/torch.matmul#3:") == [
        f"base:layers.7.attn/torch.matmul#3:{slot}" for slot in ("input.0", "output.0")
    ]
    assert offered("ls -p back") == ["backward"]
    assert offered("ls -t torch.m") == ["torch.matmul"]
    assert offered("help v") == ["vc", "vcs"]
    assert offered("nothing ") == []
    assert offered("ni 'a ") == []
