"""The table of switches that comes along, tables of users, and Ascend's fusion rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trueup.analysis.triage.running import fusion_file, load
from trueup.analysis.triage.triaging import by_hand
from trueup.foundation.model import TrueupError

ROW = '[[switch]]\nname = "a"\nframework = "torch"\nwhat = "w"\norigin = "o"\n'


def test_what_comes_along_is_whole() -> None:
    table = load()
    for framework in ("torch", "paddle", "tensorflow"):
        top = table.top(framework, ["cpu"])
        assert top
        assert len({row.name for row in top}) == len(top)
        assert not any(row.held or row.device for row in top)
    assert [row.name for row in table.held()] == ["random numbers of compiled code"]
    whole = next(row for row in table.top("tensorflow", ["cpu"]) if row.name == "grappler")
    assert "remapping" in {row.name for row in table.parts(whole, "tensorflow", ["cpu"])}


def test_devices_choose_rows() -> None:
    table = load()
    assert "cuDNN" in {row.name for row in table.top("torch", ["cpu", "cuda:0"])}
    assert "Ascend fusion" in {row.name for row in table.top("torch", ["npu:3"])}
    assert "TensorFloat-32" in {row.name for row in table.top("tensorflow", ["gpu:0"])}


def test_some_alone_and_parts_by_name() -> None:
    assert [row.name for row in load(only=["remapping", "oneDNN"]).top("tensorflow", ["cpu"])] == ["remapping", "oneDNN"]
    with pytest.raises(TrueupError, match=r"There is no switch onednn\.\n  expected: one of torch\.compile, "):
        load(only=["onednn"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "table of switches .*own.toml cannot be read: "),
        ("a = 1", "'a' is unknown: expected switch; see docs/triage.md"),
        ("", "it holds no switches: tables, each headed \\[\\[switch\\]\\]"),
        (ROW, "switch 1: one of environment, call, set, adapter, rules is missing"),
        (ROW + "environment = 3\n", "switch 1: environment: expected a table, got a whole number"),
        (ROW + 'environment = { A = "1" }\nwithin = "b"\n', "a is within b, and there is no such switch"),
        (ROW + "color = 1\n", "switch 1: 'color' is unknown: expected name, framework"),
        (ROW + "call = [3]\n", "switch 1: call must be \\[\\[function, arguments"),
        (ROW.replace("torch", "caffe") + 'environment = { A = "1" }\n', "framework 'caffe' is unknown"),
        ('[[switch]]\nname = "a"\n', "switch 1: framework is missing"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(TrueupError, match=said):
        load(tmp_path / "own.toml")


def test_rules_that_took_effect_become_switches(tmp_path: Path) -> None:
    told = {
        "session_and_graph_id": "0_1",
        "graph_fusion": {"PassA": {"effect_times": "2", "match_times": "2"}, "PassB": {"effect_times": "0", "match_times": "9"}},
        "ub_fusion": {"PassC": {"effect_times": 1}},
    }
    (tmp_path / "fusion_result.json").write_text(json.dumps([told, {"graph_fusion": {"PassA": {"effect_times": "1"}}}]))
    table = load(fusion_result=tmp_path / "fusion_result.json")
    whole = next(row for row in table.top("tensorflow", ["cpu"]) if row.name == "fusion rules that took effect")
    parts = table.parts(whole, "tensorflow", ["cpu"])
    assert [row.name for row in parts] == ["PassA", "PassC"]
    text = fusion_file(parts)
    assert text is not None
    assert json.loads(text) == {"Switch": {"GraphFusion": {"PassA": "off"}, "UBFusion": {"PassC": "off"}}}
    assert fusion_file([]) is None
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(TrueupError, match="names no fusion rule that took effect"):
        load(fusion_result=tmp_path / "none.json")


def test_ascends_file_switches_everything_off() -> None:
    rows = [row for row in load().top("torch", ["npu"]) if row.rules]
    assert json.loads(fusion_file(rows) or "") == {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}


def test_every_switch_says_how_it_is_done_by_hand() -> None:
    table = load()
    for framework, device in (("torch", "cuda"), ("tensorflow", "gpu"), ("paddle", "gpu"), ("torch", "npu")):
        for row in table.top(framework, [device]):
            for one in (row, *table.parts(row, framework, [device])):
                assert all(by_hand(one))
                assert list(by_hand(one))
