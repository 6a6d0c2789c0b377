"""Made-up results that look like real ones, for every renderer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.doors.report.html import render_page
from trueup.foundation.model import (
    Edge,
    Evidence,
    Finding,
    Histogram,
    Neighbour,
    Occurrence,
    Result,
    Rule,
    RunSummary,
    SlotComparison,
    TensorStats,
    WorstElement,
)
from trueup.foundation.words.sentence import occurrence_text, verdict_lines

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>'\"{{7*7}}\x1b[2J\u202e<!--"

OPS = (
    ("backbone.layer1.0.conv1", "aten::convolution"),
    ("backbone.layer1.0.bn1", "aten::native_batch_norm"),
    ("backbone.layer1.0.relu", "aten::relu_"),
    ("neck.lstm", "aten::_thnn_fused_lstm_cell"),
    ("neck.norm", "aten::native_layer_norm"),
    ("head.heatmap.0", "aten::convolution"),
    ("head.size.0", "aten::convolution"),
    ("", "aten::_foreach_addcdiv_"),
)


def stats(scale: float = 1.0, **changes: Any) -> TensorStats:
    made = TensorStats(4096, -1.2345 * scale, 1.3571 * scale, 1.02e-3 * scale, 41.12 * scale, 0, 0, 0, 12, 0, 0, "ab12")
    return dataclasses.replace(made, **changes)


def slot(name: str, state: Any, error: float, method: Any = "sketch", **changes: Any) -> SlotComparison:
    kind, shape = ("float32", "float32"), ("[8, 16, 64]", "[8, 16, 64]")
    made = SlotComparison(name, state, error, method, kind, shape, stats(), stats(1 + min(error, 1.0)))
    return dataclasses.replace(made, **changes)


def near(
    hops: int, scope: str, op: str, seq: tuple[int, int], state: str = "agrees", error: float = 3e-8, **changes: Any
) -> Neighbour:
    made = Neighbour(hops, seq, 0, "backward", "api", scope, op, 0, state, "", error, error)
    return dataclasses.replace(made, **changes)


def evidence() -> Evidence:
    counts = np.histogram(np.random.default_rng(0).normal(size=4096), 40)
    spread = Histogram("grad_input.0", tuple(counts[1].tolist()), tuple(counts[0].tolist()), tuple(counts[0][::-1].tolist()))
    nan = float("nan")
    return Evidence(
        histograms=(spread,),
        worst=(
            WorstElement("grad_input.0", (3, 11, 57), 0.25, -0.125, 3145728.0),
            WorstElement("grad_input.0", (0, 0, 1), 1.0, nan, nan),
        ),
        nodes=(
            near(-2, "head.heatmap.0", "torch.conv2d", (400, 404)),
            near(-1, "neck", "torch.Tensor.reshape", (410, 415)),
            near(-1, "neck", "torch.Tensor.view", (-1, 416), "", nan),
            near(0, "neck.lstm", "torch.lstm", (412, 418), "deviates", 0.21, role="culprit"),
            near(1, "backbone.layer1.0.relu", "torch.relu", (420, 428), "deviates", 0.2, role="victim"),
        ),
        edges=(
            Edge(0, 1, ("grad_input.0", "grad_output.0"), "both", 3e-8),
            Edge(1, 3, ("grad_input.0", "grad_output.0"), "both", 3e-8),
            Edge(2, 3, ("output.0", "grad_output.0"), "candidate", nan),
            Edge(3, 4, ("grad_input.0", "grad_output.0"), "both", 0.21),
        ),
        omitted=3,
        notes=("grad_input.1: only statistics were recorded in the baseline",),
    )


RULES = (
    Rule("rounding.float32", "rounding: bilinear, 6 units; errors of inputs: bilinear, factor 4", "[HighamMary]", 1000, 30),
    Rule("move", "rounding: exact, 1 units", "[Higham] data movement rounds nothing", 240, 8),
)


def culprit(**changes: Any) -> Finding:
    made = Finding(
        kind="operator",
        step=0,
        rank=0,
        phase="backward",
        level="api",
        scope="neck.lstm",
        op="torch.lstm",
        ordinal=0,
        source="centernet.py:57 in forward",
        sentence="inputs agree (rel. L2 3e-8), outputs do not",
        rule="rounding.float32.matmul",
        error_in=3e-8,
        error_out=0.21,
        expected=6e-8,
        slots=(
            slot("grad_output.0", "agrees", 3e-8),
            slot("input.weight_ih", "equal", 0.0, "digest"),
            slot("grad_input.0", "deviates", 0.21),
            slot("grad_input.1", "deviates", 0.18, candidate=stats(1.2, n_nan=12)),
        ),
        api="torch.lstm",
        aten=("aten::_thnn_fused_lstm_cell_backward", "aten::mm", "aten::mm"),
        seq=(412, 418),
        stack=("centernet.py:57 in forward", "centernet.py:112 in forward", "train.py:88 in <module>"),
        source_line="rows, _ = self.lstm(rows)",
        victims=37,
        evidence=evidence(),
    )
    return dataclasses.replace(made, **changes)


def run(name: str, device: str, drift: float, steps: int = 3) -> RunSummary:
    losses = tuple((k, 4.217 * 0.9**k * (1 + drift * k)) for k in range(steps))
    environment = {"torch": "2.6.0+cpu", "python": "3.11.7", "device": device, "TORCH_ALLOW_TF32": "0", "seed": "1234"}
    notes = ("torch.compile was not used", "2 calls inside autograd.Function ClampGrad were seen only from outside")
    norms = tuple((k, 9.18 * 0.8**k * (1 + 2 * drift * k)) for k in range(steps))
    source = "gradients that the optimizer reads"
    return RunSummary(f"runs/{name}", "torch", (device,), 1, steps, 1240, losses, environment, notes, norms, source)


def calls(count: int = 1240, deviating: int = 38, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    which = rng.integers(0, len(OPS), count)
    error = np.where(rng.random(count) < 0.9, 0.0, 10.0 ** rng.uniform(-9, -7, count))
    state = np.where(error == 0, "equal", "agrees").astype(object)
    role = np.full(count, "", object)
    bad = np.linspace(count // 3, count - 1, deviating).astype(int) if deviating else np.array([], int)
    error[bad], state[bad], role[bad] = 10.0 ** rng.uniform(-3, -0.5, len(bad)), "deviates", "victim"
    role[bad[:1]] = "culprit"
    expected = np.full(count, 6e-8)
    return pa.table(
        {
            "rank": np.zeros(count, np.int32),
            "step": (np.arange(count) * 3 // max(count, 1)).astype(np.int32),
            "phase": np.array(["forward", "backward", "optimizer"], object)[np.arange(count) * 9 // max(count, 1) % 3],
            "level": ["aten"] * count,
            "scope": [OPS[k][0] for k in which],
            "op": [OPS[k][1] for k in which],
            "ordinal": rng.integers(0, 4, count).astype(np.int32),
            "seq_baseline": np.arange(count),
            "seq_candidate": np.arange(count) + 6,
            "error_in": np.where(role == "culprit", 3e-8, error),
            "error_out": error,
            "expected": expected,
            "ratio": error / expected,
            "state": state,
            "role": role,
            "rule": ["rounding.float32"] * count,
            "source": ["centernet.py:57 in forward"] * count,
        }
    )


def result(verdict: Any = "deviates", **changes: Any) -> Result:
    """A result whose sentence is made from what it holds."""
    made: dict[str, Any] = {
        "verdict": verdict,
        "sentence": "",
        "culprits": (culprit(),) if verdict == "deviates" else (),
        "victims": tuple(culprit(scope=f"head.{k}", step=1) for k in range(37)) if verdict == "deviates" else (),
        "unmatched": (),
        "notes": (),
        "criterion": "default: error relative to the rounding noise of dtype and reduction length",
        "baseline": run("cpu", "cpu", 0.0),
        "candidate": run("npu", "npu:0", 0.031 if verdict == "deviates" else 0.0),
        "counts": {"compared": 1240, "equal": 1110, "agrees": 92, "deviates": 38, "incomparable": 0, "unmatched": 0},
        "calls": calls(),
        "rules": RULES,
    } | changes
    if verdict == "aligned" and "counts" not in changes:
        made["counts"] = {"compared": 1234, "equal": 1200, "agrees": 34, "deviates": 0, "steps": 3}
        made["calls"] = changes.get("calls", calls(1234, 0))
    if not made["sentence"]:
        made["sentence"] = "\n".join(
            verdict_lines(verdict, made["culprits"], made["victims"], made["unmatched"], made["notes"], made["counts"])
        )
    return Result(**made)


@cache
def rendered(make: Callable[..., Result], *arguments: str) -> str:
    """Return the page of a result, which is rendered once for all tests that look at it."""
    return render_page(make(*arguments))


def large() -> Result:
    return result(calls=calls(100_000, 4000))


def missing(side: Any = "candidate", k: int = 0, **changes: Any) -> Finding:
    return culprit(
        kind="unmatched",
        side=side,
        scope=f"decoder.{k}.proj",
        op="aten::copy_",
        level="aten",
        api=None,
        phase="forward",
        slots=(),
        sentence="exists in only one run",
        seq=(900 + k, -1) if side == "baseline" else (-1, 900 + k),
        evidence=None,
        neighbours=(
            near(-1, f"decoder.{k}", "aten::view", (899, 899), level="aten", phase="forward"),
            near(1, f"decoder.{k}.proj", "aten::mm", (901, -1) if side == "baseline" else (-1, 901), "", float("nan")),
        ),
        **changes,
    )


def ranks() -> Result:
    """A difference that three ranks got from rank 1, one of them over another, and of which a fourth knows no origin."""
    here = Occurrence(1, 0, "backward", "api", "neck.lstm", "torch.lstm", 0, (412, 418), 0.21, None, 1, "")
    reduce = Occurrence(0, 0, "collective", "aten", "", "c10d::allreduce_", 3, (900, 906), 0.034, 1, 1, "")
    passed = dataclasses.replace(reduce, rank=2, step=1, op="c10d::recv_", sender=0)
    unknown = dataclasses.replace(passed, rank=3, sender=2, cause=None, scope=HOSTILE)
    seen = [dataclasses.replace(one, sentence=occurrence_text(one)) for one in (reduce, here, passed, unknown)]
    first = culprit(rank=1)
    shown = result(culprits=(first,), occurrences=seen)
    lines = verdict_lines("deviates", [first], (), (), (), shown.counts, seen)
    return dataclasses.replace(shown, sentence="\n".join(lines))


def crowded() -> Result:
    """Everything at once: several culprits, unmatched calls, notes, many steps, other dtypes, an argument."""
    epsilon = slot("arguments", "deviates", float("nan"), "value", dtype=("", ""), shape=("", ""))
    epsilon = dataclasses.replace(
        epsilon, baseline='{"eps": 1e-05, "shape": [64]}', candidate='{"eps": 1e-06, "shape": [64]}'
    )
    cast = slot("output.0", "incomparable", float("nan"), "none", dtype=("float32", "bfloat16"), reason="dtypes differ")
    others = (
        culprit(
            kind="argument",
            scope="neck.norm",
            op="torch.nn.functional.layer_norm",
            slots=(epsilon, cast),
            phase="forward",
        ),
        culprit(scope="head.size.0", error_out=4e-7, expected=6e-8, confidence="could be rounding", source=None),
        culprit(kind="input", scope="backbone.conv1", phase="forward", slots=(slot("input.0", "deviates", 0.4),)),
        culprit(kind="random", scope="neck.drop", op="torch.nn.functional.dropout", phase="forward"),
        culprit(kind="region", scope="neck.attn", phase="forward"),
    )
    return result(
        culprits=(culprit(), *others),
        unmatched=tuple(missing("candidate" if k % 3 else "baseline", k) for k in range(23)),
        notes=(
            "the candidate capture was interrupted: step 2 is incomplete",
            "aten streams differ: judged at level api",
        ),
        baseline=run("cpu", "cpu", 0.0, 40),
        candidate=run("npu", "npu:0", 0.031, 40),
    )
