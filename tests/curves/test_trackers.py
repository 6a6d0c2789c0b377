"""`trueup export-metrics`: what a capture and a report tell, read back from what each tracker's library wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from report import results
from trueup.doors.cli import main
from trueup.doors.report.saving import save
from trueup.exchange import curves
from trueup.exchange.curves import metrics
from trueup.foundation.store.series import SeriesWriter
from verdict.captures import Recording

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(results.result(), tmp_path_factory.mktemp("made") / "report")


@pytest.fixture
def overflowed(tmp_path: Path) -> Path:
    run = Recording()
    for step, given in enumerate((1.0, np.inf)):
        run.call("aten::neg", [np.full(4, 2.0, np.float32)], [np.full(4, -2.0, np.float32)], step=step, scope="a")
        run.call("aten::exp", [np.full(4, 99.0, np.float32)], [np.full(4, given, np.float32)], step=step, scope="b")
        run.call("torch.Tensor.backward", [np.float32([3.5 - step])], level="api", step=step)
    return run.write(tmp_path / "npu")


def exported(source: Path, tracker: str, into: Path) -> Path:
    assert main(["export-metrics", str(source), "--to", tracker, "-o", str(into)]) == 0
    return into


def test_a_report_for_tensorboard(report: Path, tmp_path: Path, capsys: Said) -> None:
    board = exported(report, "tensorboard", tmp_path / "board")
    exported(report, "tensorboard", tmp_path / "board")  # again: in its place
    said = capsys.readouterr().out
    assert f"tensorboard --logdir {board}" in said
    verdict = json.loads((report / "verdict.json").read_text())
    for name in ("baseline", "candidate"):
        (run,) = curves.read(board / name)
        want = {one["step"]: one["loss"] for one in verdict[name]["losses"]}
        series = run.series["loss"]
        assert dict(zip(series.steps.tolist(), series.values.tolist(), strict=True)) == pytest.approx(want, rel=1e-6)
        assert (series.again, len(list((board / name).iterdir()))) == (0, 1)
    table = parquet.read_table(report / "calls.parquet").to_pylist()
    assert run.series["calls_that_deviate"].values.sum() == sum(row["state"] == "deviates" for row in table)
    assert verdict["culprits"][0]["scope"].encode() in (board / "candidate").glob("*").__next__().read_bytes()


def test_a_report_as_openmetrics(report: Path, tmp_path: Path) -> None:
    text = (exported(report, "openmetrics", tmp_path / "node") / "trueup.prom").read_text()
    assert text.endswith("# EOF\n")
    assert 'trueup_verdict{run="candidate",verdict="deviates"} 1.0\n' in text
    held = json.loads((report / "verdict.json").read_text())
    first = held["baseline"]["losses"][0]
    assert f'trueup_loss{{run="baseline",step="{first["step"]}"}} {first["loss"]!r}\n' in text
    assert f'trueup_calls{{run="candidate",state="deviates"}} {held["counts"]["deviates"]}\n' in text
    label = r'\w+="(?:[^"\\\n]|\\[\\n"])*"'
    sample = rf"trueup_\w+\{{{label}(?:,{label})*\}} (?:[-+]?[0-9.e+-]+|NaN|[-+]Inf)"
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(sample, line)] == []
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines), "a label set twice"
    families = [line.split("{")[0] for line in lines]
    assert [name for k, name in enumerate(families) if k and families[k - 1] != name] == sorted(
        set(families) - {families[0]}, key=families.index
    ), "a family in two pieces"


def test_a_capture_tells_what_overflowed(overflowed: Path, tmp_path: Path, capsys: Said) -> None:
    text = (exported(overflowed, "openmetrics", tmp_path / "node") / "trueup.prom").read_text()
    assert 'trueup_loss{run="npu",step="1"} 2.5\n' in text
    assert 'trueup_tensors_with_inf{run="npu",step="0"} 0.0\ntrueup_tensors_with_inf{run="npu",step="1"} 1.0\n' in text
    found = r'^trueup_finding\{run="npu",finding="1",rank="0",step="1",phase="forward",scope="b",op="aten::exp"'
    assert re.search(found, text, re.M)
    assert "note  no gradient of a parameter was recorded" in capsys.readouterr().out


def test_a_long_curve_is_thinned_for_prometheus_alone(tmp_path: Path) -> None:
    long = metrics.Series.of({step: float(step) for step in range(0, 5002, 2)})
    metrics.write(metrics.Metrics([metrics.Told("run", {"loss": long})]), "openmetrics", tmp_path)
    lines = re.findall(r'step="(\d+)"', (tmp_path / "trueup.prom").read_text())
    assert (len(lines) <= 1001, lines[0], lines[-1]) == (True, "0", "5000")


def test_the_document(report: Path, tmp_path: Path, capsys: Said) -> None:
    assert main(["export-metrics", str(report), "--to", "openmetrics", "-o", str(tmp_path), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["tracker"], [one["name"] for one in told["runs"]]) == (
        "trueup-metrics", "openmetrics", ["baseline", "candidate"],
    )  # fmt: skip
    assert told["runs"][1]["findings"][0]["facts"]["op"]


def test_mlflow(report: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    exported(report, "mlflow", tmp_path / "flow")
    runs = {run.name: run for place in (tmp_path / "flow").glob("*/*/metrics") for run in curves.read(place.parent)}
    assert len(runs) == 2
    held = json.loads((report / "verdict.json").read_text())
    assert sorted(run.series["loss"].values.tolist() for run in runs.values()) == sorted(
        [one["loss"] for one in held[name]["losses"]] for name in ("baseline", "candidate")
    )


def test_wandb_offline(report: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    exported(report, "wandb", tmp_path / "w")
    files = sorted((tmp_path / "w/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert [b"calls_that_deviate" in file.read_bytes() for file in files].count(True) == 1  # the candidate's


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nothing", "--to", "openmetrics", "-o", "o"], 2, "got:      nothing by this name"),
        (["mine", "--to", "openmetrics", "-o", "o"], 2, "got:      another folder"),
        (["broken", "--to", "openmetrics", "-o", "o"], 2, "The report cannot be read."),
        (["other", "--to", "openmetrics", "-o", "o"], 2, "got:      trueup-curves"),
        (["other", "--to", "openmetrics", "-o", "mine/file"], 2, ""),
        (["other", "--to", "prometheus", "-o", "o"], 64, "expected: one of tensorboard, openmetrics, wandb, mlflow"),
    ],
)
def test_what_cannot_be_exported(
    arguments: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("mine/file", ""), ("broken/verdict.json", '{"schema": 1'), ("other/verdict.json", None)):
        Path(name).parent.mkdir()
        run = {"path": "x"}
        held = {"schema": "trueup-curves", "verdict": "aligned", "sentence": "", "baseline": run, "candidate": run}
        Path(name).write_text(json.dumps(held) if text is None else text)
    assert main(["export-metrics", *arguments]) == code
    assert said in capsys.readouterr().err
    assert not Path("o/trueup.prom").exists()


def test_a_library_that_is_missing_is_named_first(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["export-metrics", str(report), "--to", "tensorboard", "-o", str(tmp_path / "o")]) == 2
    assert "pip install 'trueup[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_monitored_run(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "m", 0, {"monitor": {}}, {"world_size": 1})
    for step, row in enumerate(([3.0, 0.5], [2.5, 0.25])):
        writer.append(step, [(("loss", "gradient_norm/a"), np.array(row))])
    writer.close("complete")
    (run,) = curves.read(exported(tmp_path / "m", "tensorboard", tmp_path / "board") / "m")
    assert (run.series["loss"].values.tolist(), run.series["gradient_norm/a"].values.tolist()) == ([3.0, 2.5], [0.5, 0.25])
    text = (exported(tmp_path / "m", "openmetrics", tmp_path / "prom") / "trueup.prom").read_text()
    assert 'trueup_loss{run="m",step="1"} 2.5' in text
    assert "gradient_norm/" not in text, "a layer's series are none of Prometheus'"
    assert 'gradient_norm="l2 norm' in text
