"""Which forward call a recomputed call repeats, told by the recorder's calls alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from trueup.foundation.model import TrueupError
from trueup.recording.engine.checkpointing import Run, followed, link
from trueup.recording.engine.session import check
from trueup.recording.recorder import CaptureOptions, Recorder
from trueup.recording.registry import ADAPTERS, adapter, listed, meant


def recorder(path: Path) -> Recorder:
    return Recorder(path, CaptureOptions.of(), lambda: (0, {}, {}), lambda _: None)


def test_the_nth_call_repeats_the_nth(tmp_path: Path) -> None:
    made, runs = recorder(tmp_path), []

    def body(phase: str) -> list[tuple[int, int | None]]:
        calls = [made.begin("api", phase, "block", op) for op in ("matmul", "add", "matmul")]
        for call in calls:
            link(runs, call)
        return [(call.seq, call.forward_seq) for call in calls]

    run = followed(body, defaultdict(list), "block", lambda: (runs, 7), ran=False)
    first, again = run("forward"), run("recompute")
    assert [forward for _, forward in first] == [None, None, None]
    assert [forward for _, forward in again] == [seq for seq, _ in first]
    assert runs == []


def test_a_call_that_the_first_run_did_not_make_repeats_none(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    call = made.begin("api", "recompute", "block", "relu")
    link([Run(defaultdict(list), "block", repeats=True, within=0)], call)
    assert call.forward_seq is None


def test_the_registry_says_what_there_is() -> None:
    assert [found.name for found in ADAPTERS][:2] == ["torch", "paddle"]
    assert listed(["a", "b", "c"]) == "a, b or c"
    assert listed(["a"]) == "a"
    import torch

    assert meant(torch.nn.Linear(1, 1)) is adapter("torch")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("level aten", CaptureOptions.of(level="aten")),
        ("compile=through", CaptureOptions.of(compile="through")),
        ("inputs_from", replace(CaptureOptions.of(), inputs_from="base")),
    ],
)
def test_what_an_adapter_lacks_is_refused(name: str, options: CaptureOptions) -> None:
    with pytest.raises(TrueupError) as raised:
        check(options, adapter("paddle"))
    assert str(raised.value).splitlines() == [
        f"{name} is not there for PaddlePaddle",
        "  expected: level module, api or all; detail digest, stats or tensor",
        f"  got:      {name}",
        "  next:     leave it out (docs/paddle.md says what there is)",
    ]
    check(options, adapter("torch"))
