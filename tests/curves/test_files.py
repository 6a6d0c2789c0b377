"""What is read: lines of every trainer in the table, tables, JSON, trackers' folders; and what is refused."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from trueup.analysis.curves.judging import judge
from trueup.analysis.curves.run import chosen
from trueup.exchange.curves import read
from trueup.exchange.readers.tfdbg2 import masked
from trueup.foundation.model import TrueupError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRAINERS = tomllib.loads((Path(__file__).parent / "trainers.toml").read_text(encoding="utf-8"))["trainer"]


def pairs(file: Path, series: str = "loss", **more: list[str]) -> list[tuple[int, float]]:
    (run,) = read(file, more.get("patterns", ()))
    held = run.series[series]
    return list(zip(held.steps.tolist(), held.values.tolist(), strict=True))


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer["name"])
def test_lines_of(trainer: dict[str, Any], tmp_path: Path) -> None:
    name = trainer.get("series", "lm loss" if trainer["name"] == "Megatron-LM" else "loss")
    log = written(tmp_path / "train.log", f"starting\n{trainer['text']}\ndone\n")
    assert any("of no known trainer" in note for note in read(log)[0].notes) == trainer.get("general", False)
    found = pairs(log, name)
    assert found == [(step, pytest.approx(value, nan_ok=True)) for step, value in trainer["losses"]]


def test_what_a_general_row_takes_is_said(tmp_path: Path) -> None:
    lines = "".join(f"step {n}: loss {2 + 1 / n:.4f}, time 1.5\nstep {n} saved\nrange(3): num=4, loss\n" for n in range(1, 9))
    (run,) = read(written(tmp_path / "a.log", lines))
    looks = "a log of no known trainer; read as it looks, from 8 lines with a step and a loss"
    assert run.notes == (f"{looks}, such as: step 1: loss 3.0000, time 1.5",)
    assert list(run.series) == ["loss", "time"]
    other = read(written(tmp_path / "b.log", lines.replace("8: loss 2.1250", "8: loss 2.1251")))[0]
    found = judge([run], [other], spread=0.01)
    assert [note for note in found.notes if "such as" in note] == [f"{run.name} and 1 more run: {run.notes[0]}"]
    code = written(tmp_path / "c.log", "for step in range(3):\n    loss = 0\n    num_stages=4\n")  # no number beside a step
    with pytest.raises(TrueupError, match="No line of the log is known"):
        read(code)


def test_json_lines_by_any_name(tmp_path: Path) -> None:
    rows = '{"train_lr": 1e-05, "train_loss": 1.25, "epoch": 0}\n{"train_lr": 2e-05, "train_loss": 1.0, "epoch": 1}\n'
    assert pairs(written(tmp_path / "log.txt", rows), "train_loss") == [(0, 1.25), (1, 1.0)]
    rows = '{"current_steps": 5, "total_steps": 9, "loss": 5.5}\n{"current_steps": 10, "total_steps": 9, "loss": 4.5}\n'
    assert pairs(written(tmp_path / "trainer_log.jsonl", rows)) == [(5, 5.5), (10, 4.5)]


def test_the_only_loss_is_meant(tmp_path: Path) -> None:
    (run,) = read(written(tmp_path / "a.log", "step:0/9 val_loss:10.5 time:0ms\nstep:5/9 val_loss:4.5 time:9ms\n"))
    assert chosen(run, None)[0] == "val_loss"
    (run,) = read(written(tmp_path / "b.log", "step:1 - actor/pg_loss:0.5 - critic/vf_loss:1.5\n"))
    with pytest.raises(TrueupError, match="expected: a loss, by one of its usual names"):
        chosen(run, None)


def test_a_line_of_ones_own(tmp_path: Path) -> None:
    log = written(tmp_path / "train.log", "n=5 x loss=2.5\nnoise\nn=6 loss=1e-3\n")
    assert pairs(log, patterns=[r"n=(?P<step>\d+) .*loss=(?P<loss>{number})"]) == [(5, 2.5), (6, 0.001)]
    with pytest.raises(UsageError, match="names no value"):
        read(log, [r"n=(?P<step>\d+)"])
    with pytest.raises(UsageError, match="no regular expression"):
        read(log, ["(?P<loss>"])
    with pytest.raises(TrueupError, match=r"No line of the log is known.\n  where: .*\n.*\n  got:      3 lines, such as: n=5"):
        read(log)


@pytest.mark.parametrize("name", ["run.csv", "run.tsv"])
def test_a_table(name: str, tmp_path: Path) -> None:
    text = "global_step,train/loss,note\n1,2.5,a\n2,nan,b\n3,,c\n3,1.5,d\n3,1.25,again\n"
    file = written(tmp_path / name, text.replace(",", "\t") if name.endswith("tsv") else text)
    assert pairs(file, "train/loss") == [(1, 2.5), (2, pytest.approx(float("nan"), nan_ok=True)), (3, 1.25)]
    assert read(file)[0].series["train/loss"].again == 1


def test_exports_of_trackers(tmp_path: Path) -> None:
    head = '"Step","a-1 - train/loss","a-1 - train/loss__MIN","a-1 - train/loss__MAX","b-2 - train/loss"'
    wandb = f'{head}\n"0","3","3","3","4"\n"1","2","2","2",""\n'
    first, second = read(written(tmp_path / "wandb.csv", wandb))
    assert (first.name.rpartition(": ")[2], first.series["train/loss"].values.tolist()) == ("a-1", [3.0, 2.0])
    assert second.series["train/loss"].values.tolist() == [4.0]
    mlflow = "run,key,value,step,timestamp\nx,loss,3,0,1\nx,loss,2,1,2\ny,loss,9,0,1\n"
    assert [run.series["loss"].values.tolist() for run in read(written(tmp_path / "mlflow.csv", mlflow))] == [[3.0, 2.0], [9.0]]
    written(tmp_path / "mlruns/0/abc/metrics/train/loss", "1700000000000 2.5 0\n1700000000001 2.25 1\n")
    assert pairs(tmp_path / "mlruns/0/abc", "train/loss") == [(0, 2.5), (1, 2.25)]


def test_json_in_its_forms(tmp_path: Path) -> None:
    history = {"log_history": [{"loss": 2.5, "step": 10, "epoch": 0.1}, {"eval_loss": 2.0, "step": 10}, {"loss": 2.0, "step": 20}]}
    written(tmp_path / "out/checkpoint-10/trainer_state.json", "{}")
    written(tmp_path / "out/checkpoint-200/trainer_state.json", json.dumps(history))
    assert pairs(tmp_path / "out") == [(10, 2.5), (20, 2.0)]
    rows = [{"_step": 0, "loss": 2.5}, {"_step": 1, "loss": "NaN"}, {"_step": 2, "acc": 1}]
    assert pairs(written(tmp_path / "a.json", json.dumps(rows))) == [(0, 2.5), (1, pytest.approx(float("nan"), nan_ok=True))]
    lines = "\n".join(map(json.dumps, rows)) + '\n{"_step": 3, "lo'
    assert pairs(written(tmp_path / "wandb-history.jsonl", lines))[0] == (0, 2.5)
    assert pairs(written(tmp_path / "scalars.json", lines))[0] == (0, 2.5)
    assert pairs(written(tmp_path / "b.json", json.dumps({"step": [5, 6], "loss": [2, 1]}))) == [(5, 2.0), (6, 1.0)]
    golden = {"lm loss": {"start_step": 1, "end_step": 9, "step_interval": 4, "values": [3, 2, 1]}}
    assert pairs(written(tmp_path / "g.json", json.dumps(golden)), "lm loss") == [(1, 3.0), (5, 2.0), (9, 1.0)]
    golden["lm loss"]["values"] = {"1": 3, "5": 2.5}
    assert pairs(written(tmp_path / "g.json", json.dumps(golden)), "lm loss") == [(1, 3.0), (5, 2.5)]
    assert pairs(written(tmp_path / "c.json", json.dumps([[1.5, 3, 2.0], [1.6, 4, 1.0]]))) == [(3, 2.0), (4, 1.0)]


def test_events_of_tensorboard(tmp_path: Path) -> None:
    def value(tag: bytes, number: float) -> bytes:
        inner = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", number)
        return b"\x0a" + bytes([len(inner)]) + inner

    def record(step: int, number: float) -> bytes:
        summary = value(b"train/loss", number)
        data = b"\x09" + struct.pack("<d", 1.7e9) + b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)]) + summary
        head = struct.pack("<Q", len(data))
        return head + struct.pack("<I", masked(head)) + data + struct.pack("<I", masked(data))

    file = tmp_path / "tb/events.out.tfevents.1.host"
    file.parent.mkdir()
    file.write_bytes(record(1, 2.5) + record(2, 0.0) + record(3, 2.0)[:-6])
    assert pairs(file.parent, "train/loss") == [(1, 2.5), (2, 0.0)]
    assert "damaged or cut off" in read(file)[0].notes[0]
    file.write_bytes(b"no record at all")
    with pytest.raises(TrueupError, match="got:      none; a file is damaged or cut off"):
        read(file)


def test_a_number_a_row(tmp_path: Path) -> None:
    rows = "metricKey,runId,runName,step,timestamp,value\nloss,ab,owl,1,17,2.5\nloss,ab,owl,2,18,2.25\n"
    assert pairs(written(tmp_path / "chart.csv", rows)) == [(1, 2.5), (2, 2.25)]
    answer = [{"key": "loss", "value": 3 - step, "timestamp": 17, "step": step} for step in (1, 2)]
    assert pairs(written(tmp_path / "history.json", json.dumps({"metrics": answer}))) == [(1, 2.0), (2, 1.0)]


def test_the_only_number_is_meant(tmp_path: Path) -> None:
    (run,) = read(written(tmp_path / "board.csv", "Wall time,Step,Value\n1.7,1,2.5\n1.8,2,2.25\n"))
    assert chosen(run, None)[0] == "Value"


def test_a_bar_drawn_with_backspaces(tmp_path: Path) -> None:
    bar = "  1/9 [>...] - ETA: 3s - loss: 3.0"
    log = written(tmp_path / "a.log", f"Epoch 1/2\n{bar}{chr(8) * len(bar)}9/9 [===] - 3s 3ms/step - loss: 2.5\n")
    assert pairs(log) == [(1, 2.5)]


def test_the_seed_is_read_from_the_name(tmp_path: Path) -> None:
    names = {"run-seed3.csv": 3, "seed_12.csv": 12, "base-s4.csv": 4, "base.csv": None, "v1.5.csv": None}
    assert {name: read(written(tmp_path / name, "step,loss\n1,2\n"))[0].seed for name in names} == names


@pytest.mark.parametrize(("name", "text"), [
    ("empty.csv", ""), ("text.csv", "a,b\nx,y\n"), ("deep.json", "[" * 100_000), ("null.json", "null"), ("bytes.log", "\0\1\2"),
])  # fmt: skip
def test_what_holds_no_curve_is_refused(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(TrueupError, match=r"no curve|No line"):
        read(written(tmp_path / name, text))
    with pytest.raises(TrueupError, match="nothing by this name"):
        read(tmp_path / "absent.csv")
    with pytest.raises(TrueupError, match="expected: a capture"):
        read(tmp_path)
