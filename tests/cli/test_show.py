from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.doors.report.capture_view import bar, histograms, write_npy
from trueup.foundation.model import TrueupError

from .conftest import FakeCapture, row

Trueup = Callable[..., Any]
HEADER = "runs/npu  torch 2.6.0 on npu:0, 1 rank, 2 steps, 5 calls, levels api, aten, complete"


def test_calls_with_their_slots(trueup: Trueup, capture: FakeCapture) -> None:
    ran = trueup("show", "runs/npu")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        HEADER,
        "",
        "   seq call                                       min    max     mean     l2",
        "     0  backbone.layer1.0.conv1  torch.conv2d#0  forward, step 0, api",
        "       input.0        float32 [64,64]          -1.000  1.000  1.90e-4  45.25",
        "       output.0       float32 [8,64,32,32]     -1.000  1.000  1.90e-4  45.25",
        '       arguments      {"stride": 1, "padding": [1, 1]}',
        "     4  neck.lstm  torch.lstm#0  forward, step 0, api",
        "       input.0        float32 [64,64]          -1.000  1.000  1.90e-4  45.25",
        "       output.0       float32 [64,64]       -1.25e-12  1.000  1.90e-4  45.25",
        "     9  neck.lstm  torch.lstm#0  backward, step 0, api",
        "       grad_output.0  float32 [64,64]          -1.000  1.000  1.90e-4  45.25",
        "       grad_input.0   float32 [64,64]          -1.000  1.000  1.90e-4  45.25  12 NaN, 1 inf",
        "    11  aten::_foreach_add_#0  optimizer, step 0, aten",
        "       input.0        bfloat16 []              -1.000  1.000  1.90e-4  45.25",
        "    15  neck.lstm  torch.lstm#0  forward, step 1, api",
        "       input.0        float32 [64,64]          -1.000  1.000  1.90e-4  45.25",
    ]


def heads(ran: Any) -> list[str]:
    """The seq numbers listed."""
    return [line.split()[0] for line in ran.out.splitlines() if line[:6].strip().isdecimal()]


@pytest.mark.parametrize(
    ("options", "seqs"),
    [
        (["--scope", "neck.*"], ["4", "9", "15"]),
        (["--scope", "neck"], ["4", "9", "15"]),
        (["--op", "*lstm"], ["4", "9", "15"]),
        (["--op", "_foreach_*"], ["11"]),
        (["--phase", "backward"], ["9"]),
        (["--step", "1"], ["15"]),
        (["--level", "aten"], ["11"]),
        (["--scope", "neck.lstm", "--phase", "forward", "--step", "0", "--rank", "0"], ["4"]),
        (["--scope", ""], ["11"]),
        (["--limit", "2"], ["0", "4"]),
    ],
)
def test_choices(trueup: Trueup, capture: FakeCapture, options: list[str], seqs: list[str]) -> None:
    ran = trueup("show", "runs/npu", *options)
    assert (ran.code, heads(ran)) == (0, seqs)


def test_more_calls_than_the_limit_are_counted(trueup: Trueup, capture: FakeCapture) -> None:
    assert trueup("show", "runs/npu", "--limit", "2").out.splitlines()[-1] == (
        "and 3 more calls: raise --limit, or choose with --scope, --op, --phase, --step, --where"
    )


@pytest.mark.parametrize(
    ("options", "got"),
    [
        (["--scope", "neck.lsm"], "no scope neck.lsm; near are neck.lstm"),
        (["--step", "7"], "no step 7; there are 0, 1"),
        (["--rank", "3"], "no rank 3; there are 0"),
        (["--phase", "data"], "no phase data; there are forward, backward, optimizer"),
        (["--level", "module"], "no level module; there are api, aten"),
        (["--op", "torch.lstn"], "no op torch.lstn; near are torch.lstm, torch.conv2d"),
        (["--phase", "backward", "--step", "1"], "calls for each option, but none for all of them together"),
    ],
)
def test_a_choice_of_nothing_is_said(trueup: Trueup, capture: FakeCapture, options: list[str], got: str) -> None:
    ran = trueup("show", "runs/npu", *options)
    assert ran.code == 0
    assert ran.err.splitlines() == [
        "trueup: Nothing in runs/npu was chosen.",
        f"  expected: calls that match {' '.join(options)}",
        f"  got:      {got}",
        "  next:     drop or widen an option; `trueup show CAP --tree` lists the modules",
    ]


def test_an_empty_capture(trueup: Trueup, capture: FakeCapture) -> None:
    capture.table = capture.table.slice(0, 0)
    ran = trueup("show", "runs/npu")
    assert ran.code == 2
    assert "got:      an empty capture" in ran.err


def test_problems_are_shown(trueup: Trueup, capture: FakeCapture) -> None:
    capture.problems = [f"step {k} is \x1b[2Jdamaged" for k in range(7)]
    lines = trueup("show", "runs/npu").out.splitlines()
    assert lines[1] == "problem  step 0 is \\x1b[2Jdamaged"
    assert lines[6] == "and 2 more problems"


def test_the_tree_of_modules(trueup: Trueup, capture: FakeCapture) -> None:
    assert trueup("show", "runs/npu", "--tree").out.splitlines() == [
        HEADER,
        "",
        "modules",
        "├── outside any module  1 optimizer",
        "├── backbone",
        "│   └── layer1",
        "│       └── 0",
        "│           └── conv1  1 forward",
        "└── neck",
        "    └── lstm  2 forward, 1 backward  1 call with NaN or inf",
    ]


@pytest.mark.parametrize(
    ("call", "more"), [("4", []), ("neck.lstm/torch.lstm#0", ["--phase", "forward", "--step", "0"])]
)
def test_a_tensor_that_was_kept(trueup: Trueup, capture: FakeCapture, call: str, more: list[str]) -> None:
    ran = trueup("show", "runs/npu", *more, "--tensor", call, "input.0")
    lines = ran.out.splitlines()
    assert ran.code == 0
    assert lines[0] == "neck.lstm/torch.lstm#0  input.0  seq 4, forward, step 0, rank 0, api"
    assert lines[1] == "your code: centernet.py:57 in forward  rows, _ = self.lstm(rows)"
    assert lines[3] == "tensor  float32 [64, 64] on npu:0"
    assert "-1.000 to -0.8750  ████████████████████████████████████████   658" in ran.out
    assert "-0.1250 to       0  ██" in ran.out
    assert "first elements  0  0.8414710  0.9092974" in ran.out


def test_a_tensor_of_which_only_statistics_were_kept(trueup: Trueup, capture: FakeCapture) -> None:
    lines = trueup("show", "runs/npu", "--tensor", "9", "grad_input.0").out.splitlines()
    assert "NaN     12" in lines
    assert lines[-2:] == [
        "Only statistics of it were kept. For its elements:",
        "  trueup capture -o DIR --detail tensor --include neck.lstm --steps 0 -- COMMAND",
    ]


def test_an_argument(trueup: Trueup, capture: FakeCapture) -> None:
    assert '"stride": 1,' in trueup("show", "runs/npu", "--tensor", "0", "arguments").out


def test_an_ambiguous_call_lists_what_it_could_mean(trueup: Trueup, capture: FakeCapture) -> None:
    ran = trueup("show", "runs/npu", "--tensor", "neck.lstm/torch.lstm#0", "input.0")
    assert ran.code == 2
    assert ran.err.splitlines()[0] == "trueup: neck.lstm/torch.lstm#0 does not mean one call."
    assert "seq 4 (forward, step 0, rank 0, api); seq 9 (backward" in ran.err


@pytest.mark.parametrize(
    ("call", "slot", "said"), [("77", "input.0", "got:      none"), ("4", "x", "one of input.0, output.0")]
)
def test_a_tensor_that_is_not_there(trueup: Trueup, capture: FakeCapture, call: str, slot: str, said: str) -> None:
    ran = trueup("show", "runs/npu", "--tensor", call, slot)
    assert ran.code == 2
    assert said in ran.err


def test_hostile_names_do_not_steer_the_terminal(trueup: Trueup, capture: FakeCapture) -> None:
    evil = "a\x1b[31m[bold]\n\u202eb"
    capture.table = pa.Table.from_pylist([row(1, evil, scope=evil, op=evil, dtype=evil)])
    for options in ([], ["--tree"], ["--tensor", "1", evil]):
        ran = trueup("show", "runs/npu", *options)
        assert ran.code == 0
        assert "\x1b" not in ran.out
        assert "\u202e" not in ran.out
        assert "[bold]" in ran.out


@settings(deadline=None)
@given(st.lists(st.floats(width=64), max_size=60))
def test_a_histogram_counts_every_finite_element(values: list[float]) -> None:
    made = [(low, high, counts[0]) for low, high, counts in histograms([np.array(values)])]
    assert sum(count for *_, count in made) == int(np.isfinite(values).sum())
    assert all(low <= high for low, high, _ in made)


def test_histograms_of_odd_tensors() -> None:
    assert histograms([np.zeros((0, 3))]) == []
    assert histograms([np.array(2.5)]) == [(2.5, 2.5, [1])]
    assert sum(counts[0] for *_, counts in histograms([np.array([True, False, True])])) == 3
    assert sum(counts[0] for *_, counts in histograms([np.array([3 + 4j, 0])])) == 2


def test_bars() -> None:
    assert bar(1.0, 4) == "████"
    assert bar(0.0, 4) == ""
    assert bar(1e-9, 4) == "▏"
    assert bar(0.5, 3) == "█▌"


def test_a_payload_that_cannot_be_read(trueup: Trueup, capture: FakeCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise TrueupError("tensors-0000.safetensors is missing")

    monkeypatch.setattr(capture, "payload", lost)
    ran = trueup("show", "runs/npu", "--tensor", "4", "input.0")
    assert (ran.code, ran.err.splitlines()) == (2, [
        "trueup: The elements of neck.lstm/torch.lstm#0 input.0 cannot be trusted.", "  where:    seq 4, step 0, rank 0",
        "  got:      tensors-0000.safetensors is missing",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("options", "seqs"),
    [
        (["--nan"], ["9"]),
        (["--inf"], ["9"]),
        (["--saturated"], ["0"]),
        (["--nan", "--saturated"], ["0", "9"]),
        (["--where", "n_nan > 0"], ["9"]),
        (["--where", "min<-1 and l2 >= 40"], ["4"]),
        (["--where", "min < -2"], []),
        (["--where", "n_nan >= 0", "--op", "*lstm", "--step", "1"], ["15"]),
    ],
)
def test_choices_by_numbers(trueup: Trueup, capture: FakeCapture, options: list[str], seqs: list[str]) -> None:
    rows = capture.table.to_pylist()
    rows[1]["n_saturated"] = 3
    rows[4]["min"] = -1.25
    capture.table = pa.Table.from_pylist(rows, capture.table.schema)
    ran = trueup("show", "runs/npu", *options)
    assert (ran.code, heads(ran)) == (0, seqs)


def test_only_the_tensors_that_are_so_are_listed(trueup: Trueup, capture: FakeCapture) -> None:
    lines = trueup("show", "runs/npu", "--nan").out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["9", "grad_input.0"]
    assert "neck" in trueup("show", "runs/npu", "--nan", "--tree").out


def test_nothing_is_so(trueup: Trueup, capture: FakeCapture) -> None:
    ran = trueup("show", "runs/npu", "--where", "l2 > 1e9", "--phase", "forward")
    assert "expected: calls that match --phase forward --where 'l2 > 1e+09'" in ran.err
    assert "got:      no tensor whose numbers are like that among the calls chosen otherwise" in ran.err


@pytest.mark.parametrize("text", ["", "n_nan", "n_nan > x", "scope > 1", "__import__('os')", "l2 > 1 or l2 < 0", "l2 ~ 3"])
def test_a_condition_that_is_none(trueup: Trueup, capture: FakeCapture, text: str) -> None:
    ran = trueup("show", "runs/npu", "--where", text)
    assert ran.code == 2
    assert ran.err.splitlines()[:2] == [
        "trueup: --where cannot be read.",
        "  expected: NAME OP NUMBER, several joined by `and`, such as 'n_nan > 0 and l2 >= 1e3'",
    ]


def test_a_plain_npy_file(trueup: Trueup, capture: FakeCapture, tmp_path: Path) -> None:
    ran = trueup("show", "runs/npu", "--tensor", "4", "input.0", "--npy", tmp_path / "x.npy")
    assert ran.out.splitlines()[-1] == f"wrote {tmp_path / 'x.npy'}: float32 [64, 64]"
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), capture.payload(0, "tensors-0000.safetensors", "k0"))
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_npy_without_elements_or_tensor(trueup: Trueup, capture: FakeCapture, tmp_path: Path) -> None:
    ran = trueup("show", "runs/npu", "--tensor", "9", "grad_input.0", "--npy", tmp_path / "x.npy")
    assert (ran.code, list(tmp_path.iterdir())) == (2, [])
    assert "x.npy was not written: no elements of torch.lstm#0 grad_input.0 were kept." in ran.err
    assert "--npy needs a tensor." in trueup("show", "runs/npu", "--npy", tmp_path / "x.npy").err
    ran = trueup("show", "runs/npu", "--tensor", "4", "input.0", "--npy", tmp_path / "no" / "x.npy")
    assert (ran.code, "cannot be written: No such file or directory" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("dtype", "plain"),
    [("bfloat16", "float32"), ("float8_e4m3fn", "float32"), ("int4", "int8"), ("uint4", "uint8"), ("bool", "bool"),
     ("float16", "float16"), ("complex64", "complex64"), ("int64", "int64")],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 4), (300, 301)])
def test_npy_widens_what_it_does_not_know(tmp_path: Path, dtype: str, plain: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 2, shape).astype(getattr(ml_dtypes, dtype, dtype))
    said = write_npy(values.T, tmp_path / "x.npy")
    read = np.load(tmp_path / "x.npy", allow_pickle=False)
    assert (read.dtype.name, read.shape) == (plain, shape[::-1])
    np.testing.assert_array_equal(read, values.T.astype(plain))
    assert said.endswith("which .npy does not know") == (plain != dtype)
