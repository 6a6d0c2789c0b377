"""Settings made in a launched process: at once, when a module is imported, or not, and then with the reason."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from trueup.recording.adapters.torch import switching
from trueup.recording.engine.replacing import NOT_USED, Switching


def test_calls_and_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = types.ModuleType("settings_of_a_framework")
    settings.seen = []  # type: ignore[attr-defined]
    settings.switch = settings.seen.append  # type: ignore[attr-defined]
    settings.fast = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    orders = [
        {"name": "one", "framework": "torch", "call": [["settings_of_a_framework.switch", False]]},
        {"name": "two", "framework": "torch", "set": {"settings_of_a_framework.fast": False}},
        {"name": "three", "framework": "torch", "set": {"settings_of_a_framework.gone": False}},
        {"name": "four", "framework": "torch", "call": [["settings_of_a_framework.gone"]]},
        {"name": "five", "framework": "paddle", "call": [["settings_of_a_framework.switch", 5]]},
    ]
    report = Switching("torch", orders).report()
    assert settings.seen == [False]
    assert settings.fast is False
    assert report["off"] == ["one", "two"]
    assert set(report["failed"]) == {"three", "four"}
    assert "has no attribute 'gone'" in report["failed"]["three"]


def test_what_is_not_imported_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_framework_part.py").write_text("fast = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    switched = Switching("torch", [{"name": "late", "framework": "any", "set": {"late_framework_part.fast": False}}])
    assert "late_framework_part" not in sys.modules
    assert switched.report()["idle"] == {"late": NOT_USED}
    import late_framework_part  # type: ignore[import-not-found]

    assert late_framework_part.fast is False
    assert switched.report() == {"off": ["late"], "failed": {}, "idle": {}, "seen": {}}
    del sys.modules["late_framework_part"]


def test_optimizers_are_made_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam):
        monkeypatch.setattr(kind, "__init__", kind.__init__)  # put back at the end
    others = [k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)]
    for kind in others:
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    switching.optimizers(["foreach", "fused"])
    weight = torch.nn.Parameter(torch.ones(3))
    for made in (torch.optim.AdamW([weight], fused=True), torch.optim.SGD([weight], 0.1, foreach=True)):
        assert (made.defaults["foreach"], made.defaults["fused"]) == (False, False)
        weight.grad = torch.ones(3)
        made.step()
