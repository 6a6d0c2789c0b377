"""Bytes of a recorded tensor that changed on disk: each command that reads it names the tensor, and shows no number of it."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cli.conftest import Ran
from trueup import capture, compare, open_capture
from trueup.doors.report.spreadsheet import MEASURES, REACHED, write_csv

Command = Callable[..., Ran]
NAME = "1/aten::tanh#0 output.0"


def train(path: Path, scale: float = 1.0) -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = scale * torch.randn(6, 8)
    with capture(path, model=net, detail="tensor"):
        net(x).square().mean().backward()
    return path


def output_of_tanh(path: Path) -> dict[str, Any]:
    (row,) = open_capture(path).records(op="aten::tanh", slot="output.0").to_pylist()
    return dict(row)


def flip(path: Path, row: dict[str, Any]) -> Path:
    """Turn over a bit in the exponent of the tensor's first number."""
    segment = path / "rank-00000" / row["payload_segment"]
    whole = bytearray(segment.read_bytes())
    begin = 8 + int.from_bytes(whole[:8], "little")
    whole[begin + json.loads(whole[8:begin])[row["payload_key"]]["data_offsets"][0] + 3] ^= 0x40
    segment.write_bytes(whole)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("damage") / "sound")


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "damaged")
    return flip(tmp_path / "damaged", output_of_tanh(sound))


def refusal(damaged: Path) -> list[str]:
    """What a command that was to show the tensor says instead."""
    row = output_of_tanh(damaged)
    segment = damaged / "rank-00000" / row["payload_segment"]
    return [
        f"trueup: The elements of {NAME} cannot be trusted.",
        f"  where:    seq {row['seq']}, step 0, rank 0",
        f"  got:      {segment}: tensor {row['payload_key']!r} is damaged: its bytes have the digest ",
        f", and those that were recorded had {row['digest']}; copy the file back from the machine that recorded the capture, or",
    ]


@pytest.mark.parametrize("side", ["baseline", "candidate"])
@pytest.mark.parametrize("options", [(), ("--json", "-")])
def test_diff(trueup: Command, sound: Path, damaged: Path, side: str, options: tuple[str, ...]) -> None:
    seq = output_of_tanh(sound)["seq"]
    first, second = (damaged, sound) if side == "baseline" else (sound, damaged)
    assert trueup("diff", f"{sound}:{seq}:output.0", sound).code == 0
    ran = trueup("diff", f"{first}:{seq}:output.0", second, *options)
    assert (ran.code, ran.out) == (2, "")
    for said in refusal(damaged):
        assert said in ran.err


def test_show_gives_the_recorded_numbers_and_no_element(trueup: Command, sound: Path, damaged: Path, tmp_path: Path) -> None:
    seq = str(output_of_tanh(sound)["seq"])
    assert "first elements" in trueup("show", sound, "--tensor", seq, "output.0").out
    ran = trueup("show", damaged, "--tensor", seq, "output.0", "--npy", tmp_path / "x.npy")
    assert ran.code == 2
    assert output_of_tanh(sound)["digest"] in ran.out
    assert "first elements" not in ran.out
    assert not (tmp_path / "x.npy").exists()
    for said in refusal(damaged):
        assert said in ran.err


@pytest.mark.usefixtures("warm")
def test_verify_capture_names_each_tensor(trueup: Command, damaged: Path) -> None:
    ran = trueup("verify-capture", damaged, "--json", damaged.parent / "found.json")
    found = json.loads((damaged.parent / "found.json").read_text())
    assert (found["schema"], found["exit_code"], len(found["damaged"]) > 0) == ("trueup-verification", 1, True)
    said = " ".join(ran.out.split())
    assert ran.code == 1
    assert said.startswith("INCOMPLETE ")
    assert "the others are named below. 1 recorded tensor is damaged." in said
    assert "damaged: 1/Tanh#0 output.0 (seq " in said  # the module's call is the first that has these bytes
    assert f"tensor '{output_of_tanh(damaged)['payload_key']}' is damaged: its bytes have the digest" in said


@pytest.mark.usefixtures("warm")
def test_a_tensor_that_no_call_reads_again_is_looked_at(trueup: Command, damaged: Path) -> None:
    """Only calls of levels api and aten are executed: the other side of the network does not touch the tensor."""
    ran = trueup("verify-capture", damaged, "--calls", "aten::t")
    assert ran.code == 1
    assert "calls give the recorded bits when they are executed again. 1 recorded tensor is damaged." in " ".join(ran.out.split())


def test_compare_says_it_and_the_tables_hold_no_measure(trueup: Command, damaged: Path, tmp_path: Path) -> None:
    result = compare(damaged, train(tmp_path / "other", scale=1 + 2.0**-20))
    assert result.verdict != "aligned", result.sentence
    key = output_of_tanh(damaged)["payload_key"]
    assert f"tensor {key!r} is damaged: its bytes have the digest" in "\n".join([result.sentence, *result.notes])
    with write_csv(result, tmp_path / "x.csv").open(newline="", encoding="utf-8") as file:
        (row,) = [row for row in csv.DictReader(file) if row["NPU Name"] == "1/aten::tanh_0_forward_output.0"]
    assert "is damaged: its bytes have the digest" in row["Err_message"]
    assert [row[name] for name in (*MEASURES, REACHED)] == ["N/A"] * 6
