"""Options that select nothing are said, with what there was to select."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture
from trueup.recording.recorder.options import CaptureOptions, Seen, sentence, unused

from .running import said, script, trueup_run

pytestmark = pytest.mark.usefixtures("warm")

KEYS = (
    ("module", "forward", "neck.lstm", "LSTM"),
    ("api", "forward", "neck.lstm", "torch.lstm"),
    ("api", "backward", "head", "torch.nn.functional.linear"),
    ("aten", "backward", "head", "aten::mm"),
)
SEEN = Seen(calls=1204, steps=3, keys=KEYS)

CASES = {
    "include 'decoder.*' matched none of 1,204 calls; scopes seen: head, neck": {"include": ["decoder.*", "neck.*"]},
    "exclude '/^dec/' matched none of 1,204 calls; scopes seen: head, neck": {"exclude": ["/^dec/"]},
    "phase optimizer matched none of 1,204 calls; phases seen: forward, backward": {"phase": ["forward", "optimizer"]},
    "steps 7 selected nothing: the run had 3 steps, 0 to 2": {"steps": [0, 7]},
    "steps 3:9 selected nothing: the run had 3 steps, 0 to 2": {"steps": range(3, 9)},
    "steps 10: selected nothing: the run had 3 steps, 0 to 2": {"steps": "10:"},
}


@pytest.mark.parametrize("message", CASES)
def test_message(message: str) -> None:
    said_ = [sentence(*item) for item in unused(CaptureOptions.of(**CASES[message]), SEEN).items()]
    assert said_ == [message]


@pytest.mark.parametrize(
    "options", [{}, {"include": "neck.*"}, {"exclude": "*mm"}, {"steps": range(10)}, {"phase": "forward"}]
)
def test_nothing_to_say(options: dict[str, object]) -> None:
    assert unused(CaptureOptions.of(**options), SEEN) == {}


def test_without_modules_operators_are_named() -> None:
    keys = tuple(("aten", "forward", "", f"aten::op{n}") for n in range(10))
    (reason,) = unused(CaptureOptions.of(include="neck"), Seen(10, 1, keys)).values()
    assert reason == (
        "matched none of 10 calls; no scopes seen (no module ran); operators seen: aten::op0, aten::op1, aten::op2, "
        "aten::op3, aten::op4, aten::op5, aten::op6, aten::op7 and 2 more"
    )


def test_level_that_never_happened() -> None:
    seen = Seen(2, 0, (("api", "forward", "", "torch.add"),))
    assert unused(CaptureOptions.of(level="module"), seen) == {
        "level module": "matched none of 2 calls; levels seen: api"
    }
    assert unused(CaptureOptions.of(steps=[1]), Seen(0, 0, ())) == {
        "steps 1": "the run ended no step (no optimizer made one), so all it did was step 0"
    }


def test_nothing_selected_is_nothing_captured(tmp_path: Path) -> None:
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--include", "decoder.*", "--ranks", "0,4", "--", *script("train.py"))
    assert run.returncode == 2
    (message,) = said(run)
    calls = message.partition("none of ")[2].partition(" ")[0]
    assert message == (
        f"trueup: nothing was captured into {out}: ranks 4 selected nothing: rank 0 ran; "
        f"include 'decoder.*' matched none of {calls} calls; scopes seen: head, neck"
    )
    assert not out.exists()


def test_part_of_a_selection(tmp_path: Path) -> None:
    out = tmp_path / "capture"
    options = ["--steps", "1,8", "--phase", "forward", "--phase", "recompute", "--include", "neck", "--include", "tail"]
    run = trueup_run("capture", "-o", out, *options, "--", *script("train.py"))
    assert run.returncode == 0
    capture = open_capture(out)
    assert capture.steps == [1]
    first, *notes = said(run)
    assert first == f"trueup: captured {capture.rows:,} slots over 1 step into {out}"
    calls = notes[1].partition("none of ")[2].partition(" ")[0]
    assert notes == [
        "trueup: note: steps 8 selected nothing: the run had 2 steps, 0 to 1",
        f"trueup: note: phase recompute matched none of {calls} calls; phases seen: forward, backward, optimizer",
        f"trueup: note: include 'tail' matched none of {calls} calls; scopes seen: head, neck",
    ]


def test_a_run_ends_when_the_last_step_that_is_asked_for_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = trueup_run("capture", "-o", path, "--level", "module", "--steps", "1:3", "--stop", "--", *script("watched.py", "healthy"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"rank 0 finished step {k}" for k in range(3)]
    assert open_capture(path).steps == [1, 2]
    assert open_capture(path).problems == []


def test_a_run_that_is_to_end_needs_a_last_step() -> None:
    for steps in (None, "3:"):
        with pytest.raises(TrueupError, match="give steps with an end, e"):
            CaptureOptions.of(steps=steps, stop=True)
