"""What two documents of ptdbg_ascend have a reader paste, run on the CPU and on the simulated accelerator, and what then shows."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from compat import pasting
from nursery import Nursery

FAULT = "lstm-backward-cell-gate"
DAMAGE = 'self.classifier.weight.data[TAGS.index("O")] = 4096'
"""The tag O asks for the sum of the features, which a layer norm makes zero: the forward is fine, the gradient is not."""
CASE = "Functional_linear_12_backward"


@pytest.fixture(scope="module")
def detector(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump the detector on both devices, as the document says, and compare."""
    folder = tmp_path_factory.mktemp("detector")
    nursery.load("skimage.transform", "transformers.optimization", "trueup_compat.ptdbg_ascend")
    for device in ("cpu", "npu"):
        child = pasting.run(nursery, pasting.centernet(device), folder, device, FAULT, example="centernet")
        assert child.wait() == 0, child.complained
        assert re.search(r"epoch 1 loss \d", child.said)
    block = pasting.blocks("centernet")["compare"].replace("/home/torch_test", str(folder))
    child = pasting.run(nursery, block, folder)
    assert child.wait() == 0, child.complained
    assert child.said.startswith("DEVIATES  first culprit: neck.lstm, backward, step 0, rank 0  (torch.lstm)")
    return folder


def test_the_table_passes_up_to_the_inputs_of_the_lstm_s_backward(detector: Path) -> None:
    (table,) = (detector / "out").glob("compare_result_*.csv")
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape", "Bench Tensor Shape", "Cosine",
        "MaxAbsErr", "NPU max", "NPU min", "NPU mean", "Bench max", "Bench min", "Bench mean", "Accuracy Reached or Not",
        "Err_message",
    ]  # fmt: skip
    reached = [row["Accuracy Reached or Not"] for row in rows]
    first = reached.index("No")
    assert set(reached[:first]) == {"Yes"}
    assert first > 300
    assert rows[first - 1]["NPU Name"] == "VF_lstm_0_backward_input.0"
    lstm = [k for k, row in enumerate(rows) if row["NPU Name"].startswith("VF_lstm_0_backward_output")]
    assert len(lstm) == 9
    assert lstm[0] == first
    assert {reached[k] for k in lstm} == {"No"}
    assert reached[first:].count("No") > 0.9 * len(reached[first:])
    assert all(row["NPU Name"] == row["Bench Name"] for row in rows)


def test_the_native_report_and_the_advice_lie_beside_it(detector: Path) -> None:
    (report,) = (detector / "out").glob("trueup_report_*")
    verdict = json.loads((report / "verdict.json").read_text())
    culprit = verdict["culprits"][0]
    assert (verdict["verdict"], culprit["scope"], culprit["phase"]) == ("deviates", "neck.lstm", "backward")
    (advice,) = (detector / "out").glob("advisor_*.txt")
    told = advice.read_text()
    assert re.match(r"Suspect Nodes: VF_lstm_0_backward_output\S+\nExpert Advice: DEVIATES  first culprit: neck\.lstm", told)


@pytest.fixture(scope="module")
def tagger(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Check the tagger for overflow on the accelerator; it ends with the exception of the document."""
    folder = tmp_path_factory.mktemp("tagger")
    child = pasting.run(nursery, pasting.bert_crf(DAMAGE), folder, "npu", example="bert_crf")
    assert child.wait() == 1
    found = re.search(r"ValueError: \[overflow 1 times\]: dump file is saved in '(\S+\.pkl)'\.", child.said + child.complained)
    assert found, child.complained
    assert f"[overflow 1 times]: module name :'{CASE}' is overflow and dump file is saved in '{found[1]}'" in child.said
    assert "step 0 loss" not in child.said
    return folder / found[1]


def test_the_file_names_the_api_that_overflowed(tagger: Path) -> None:
    assert tagger.parent.name == "rank0"
    assert tagger.parents[1].name == "npu_overflow_v2.0"
    *rows, stack = map(json.loads, tagger.read_text().splitlines())
    assert [row[0] for row in rows] == [f"{CASE}_{slot}" for slot in ("input.0", "output.0", "output.1", "output.2")]
    assert {(row[1], row[3]) for row in rows} == {(101, "torch.float16")}
    assert stack[0] == f"{CASE}_stack_info"
    assert stack[1][0][2:] == ["forward", "return self.crf(self.classifier(hidden), tags, mask)"]
    given, made = (np.load(tagger.with_suffix("") / f"{CASE}_{slot}.npy") for slot in ("input.0", "output.0"))
    assert np.isfinite(given).all()
    assert np.isinf(made).any()


def test_the_next_step_dumps_that_api_alone_on_both_sides(nursery: Nursery, tmp_path: Path) -> None:
    """The document goes on: dump the API in mode list on the accelerator and the benchmark, and compare."""
    for device in ("npu", "cpu"):
        script = pasting.bert_crf(DAMAGE).replace("range(3)", "range(1)")
        script = script.replace("overflow_check, overflow_nums=1)", "acc_cmp_dump)")
        script = script.replace("for step in", f'set_dump_switch("ON", mode="list", scope=["{CASE}"])\nfor step in')
        script = script.replace("'npu_overflow'", f"'{device}'") + 'set_dump_switch("OFF")\n'
        child = pasting.run(nursery, script, tmp_path, device, example="bert_crf")
        assert child.wait() == 0, child.complained
        assert "The number of matched dump is 1\n" in child.said
    rows = [json.loads(line) for line in (tmp_path / "data/dump/npu_v2.0/rank0/dump.pkl").read_text().splitlines()]
    assert [row[0] for row in rows] == [f"{CASE}_{slot}" for slot in ("input.0", "output.0", "output.1", "output.2")]
    assert rows[1][5][:2] == [float("inf"), float("-inf")]
    tags = {"npu": "npu", "bench": "cpu"}
    files = {f"{side}_pkl_path": str(tmp_path / f"data/dump/{tag}_v2.0/rank0/dump.pkl") for side, tag in tags.items()}
    block = f"from ptdbg_ascend import compare\ncompare({files!r}, './out')\n"
    child = pasting.run(nursery, block, tmp_path)
    assert child.wait() == 0, child.complained
    (table,) = (tmp_path / "out").glob("compare_result_*.csv")
    with table.open(newline="", encoding="utf-8") as file:
        reached = {row["NPU Name"]: row["Accuracy Reached or Not"] for row in csv.DictReader(file)}
    assert reached[f"{CASE}_output.0"] != "Yes"
