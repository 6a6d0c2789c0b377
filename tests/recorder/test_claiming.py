"""A session takes its rank's folder once, whichever of its threads asks first."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trueup.recording.engine import session


def test_two_threads_ask_for_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def claim(directory: Path, *_: Any) -> int:
        asked.append(directory)
        time.sleep(0.05)
        return 3

    monkeypatch.setattr(session, "claim", claim)
    kind = session.BaseSession
    one: Any = SimpleNamespace(
        rank=None, _claiming=kind._claiming, rank_and_world=lambda: (3, 4), recorder=SimpleNamespace(directory=tmp_path), _root={}
    )
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: kind.claim(one), range(2))) == [3, 3]
    assert asked == [tmp_path]
