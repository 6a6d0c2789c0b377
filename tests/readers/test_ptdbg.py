"""ptdbg in the layouts of versions 2.3, 2.0 (att) and 6.0, written by their rules."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

import trueup
from readers import writers
from readers.captures import find, imported, tensor
from trueup import TrueupError
from trueup.exchange.readers.ptdbg import _parse


@pytest.mark.parametrize("prefix", ["", "api_stack_", "list_", "range_"])
@pytest.mark.parametrize("version", ["2.3", "2.0", "6.0"])
def test_every_tensor_is_a_row_with_its_bytes(tmp_path: Path, version: str, prefix: str) -> None:
    result, rows, capture = imported(writers.ptdbg(tmp_path / "dump", version, prefix=prefix), tmp_path)
    assert (result.tool, result.lost, result.tensors) == (f"ptdbg {version}", [], 14)
    told = [
        (writers.ptdbg_name(version, call, f"{side}.{k}"), value)
        for call in writers.run()
        for side, values in (("input", call.inputs), ("output", call.outputs))
        for k, value in enumerate(values)
        if isinstance(value, np.ndarray)
    ]
    assert [row["foreign_name"] for row in rows if row["dtype"]] == [name for name, _ in told]
    for (_, value), row in zip(told, [row for row in rows if row["dtype"]], strict=True):
        is_transposed = (row["phase"], row["slot"]) == ("backward", "grad_input.1")  # of addmm(bias, input, weight.t())
        assert np.array_equal(tensor(capture, row), value.T if is_transposed else value)
    assert find(rows, slot="arguments")["value"] == '{"inplace": false}'  # a scalar, where filter_switch is OFF


def test_names_become_ours(tmp_path: Path) -> None:
    _, rows, _ = imported(writers.ptdbg(tmp_path / "dump"), tmp_path)
    calls = {row["seq"]: (row["phase"], row["op"], row["ordinal"], row["forward_seq"]) for row in rows}
    assert list(calls.values()) == [
        ("forward", "torch.nn.functional.linear", 0, None),
        ("forward", "torch.nn.functional.relu", 0, None),
        ("forward", "torch.sum", 0, None),
        ("backward", "torch.nn.functional.relu", 0, 1),
        ("backward", "torch.nn.functional.linear", 0, 0),
    ]
    backward = [row["slot"] for row in rows if row["phase"] == "backward"]
    assert backward == ["grad_output.0", "grad_input.0", "grad_output.0", "grad_input.2", "grad_input.0", "grad_input.1"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Functional_linear_145_backward_output.0", ("Functional", "linear", "145", "backward", "output", "0")),
        ("Tensor_abs_1_forward_input.0.1", ("Tensor", "abs", "1", "forward", "input", "0.1")),
        ("Tensor___getitem___3_forward_input", ("Tensor", "__getitem__", "3", "forward", "input", "")),
        ("Torch_max_pool2d_0_forward_stack_info", ("Torch", "max_pool2d", "0", "forward", "stack_info", "")),
        ("Distributed_all_reduce_0_pre_forward_input.0", ("Distributed", "all_reduce", "0", "forward", "input", "0")),
        ("Module_Conv_Bn_3_backward_output.0", ("Module", "Conv_Bn", "3", "backward", "output", "0")),
        ("Functional.conv2d.0.forward.input.0", ("Functional", "conv2d", "0", "forward", "input", "0")),
        ("layers.3.attn.Attention.2.backward.output.1", ("", "layers.3.attn.Attention", "2", "backward", "output", "1")),
        ("Module.layers.3.Block.0.forward.output.0", ("", "layers.3.Block", "0", "forward", "output", "0")),
    ],
)
def test_names_of_both_forms_are_taken_apart(name: str, parts: tuple[str, ...]) -> None:
    parsed = _parse(name)
    assert parsed is not None
    assert (parsed.kind, parsed.api, parsed.index, parsed.phase, parsed.side, parsed.slot) == parts


def test_modules_of_versions_3_to_5_are_known_by_their_class(tmp_path: Path) -> None:
    folder = tmp_path / "dump" / "ptdbg_dump_v5.0" / "step0" / "rank0"
    folder.mkdir(parents=True)
    rows = [
        [f"Module_Conv_Bn_{k}_{phase}_{side}.0", 0, [], "torch.float32", [2], [2.0, 1.0, 1.5, 2.5]]
        for phase, order in (("forward", (0, 1)), ("backward", (1, 0)))
        for k in order
        for side in ("input", "output")
    ]
    (folder / "dump.pkl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, found, _ = imported(tmp_path / "dump", tmp_path)
    assert {(r["level"], r["scope"], r["op"]) for r in found} == {("module", "", "Conv_Bn")}
    assert [(r["phase"], r["ordinal"], r["slot"], r["forward_seq"]) for r in found] == [
        ("forward", 0, "input.0", None), ("forward", 0, "output.0", None),
        ("forward", 1, "input.0", None), ("forward", 1, "output.0", None),
        ("backward", 0, "grad_output.0", 1), ("backward", 0, "grad_input.node.0", 1),
        ("backward", 1, "grad_output.0", 0), ("backward", 1, "grad_input.node.0", 0),
    ]  # fmt: skip


def test_stacks_are_without_the_frameworks_frames(tmp_path: Path) -> None:
    _, rows, capture = imported(writers.ptdbg(tmp_path / "dump", "6.0", prefix="api_stack_"), tmp_path)
    frames, text = capture.sites(0)[rows[0]["site"]]
    assert frames == ("/home/user/model.py:12 in forward", "/home/user/train.py:40 in <module>")
    assert text == "return self.act(self.fc(x))"
    assert {row["site"] for row in rows} == {rows[0]["site"]}


def test_stacks_alone_are_calls_without_tensors(tmp_path: Path) -> None:
    result, rows, _ = imported(writers.ptdbg(tmp_path / "dump", kind="stack", prefix="stack_"), tmp_path)
    assert (result.calls, {row["slot"] for row in rows}) == (5, {"arguments"})
    assert all(row["site"] is not None for row in rows)


def test_statistics_alone(tmp_path: Path) -> None:
    _, rows, _ = imported(writers.ptdbg(tmp_path / "dump", "6.0", "statistics"), tmp_path)
    hidden = writers.run()[0].outputs[0]
    row = find(rows, op="torch.nn.functional.linear", slot="output.0")
    assert (row["max"], row["min"], row["mean"]) == (hidden.max(), hidden.min(), hidden.mean())
    assert row["l2"] == pytest.approx(np.linalg.norm(hidden))
    assert (row["digest"], row["payload_key"]) == (None, None)
    _, rows, _ = imported(writers.ptdbg(tmp_path / "old", "2.3", "statistics"), tmp_path / "two")
    assert find(rows, op="torch.nn.functional.linear", slot="output.0")["l2"] is None  # three numbers before version 5


def test_checksums_alone(tmp_path: Path) -> None:
    result, rows, _ = imported(writers.ptdbg(tmp_path / "dump", "6.0", "md5"), tmp_path)
    expected = {f"crc32:{zlib.crc32(v.tobytes()):08x}" for call in writers.run() for v in call.inputs if isinstance(v, np.ndarray)}
    assert expected <= {row["foreign_checksum"] for row in rows}
    assert any("checksums are the tool's own" in sentence for sentence in result.lacks)


def test_rows_of_the_overflow_check_have_no_statistics(tmp_path: Path) -> None:
    result, rows, _ = imported(writers.ptdbg(tmp_path / "dump", kind="overflow"), tmp_path)
    assert {row["l2"] for row in rows} == {None}
    assert any("overflow check" in note for note in result.notes)


def test_bfloat16_that_was_saved_as_float32_is_bfloat16_again(tmp_path: Path) -> None:
    value = writers.ptdbg_bfloat16(tmp_path / "dump")
    _, rows, capture = imported(tmp_path / "dump", tmp_path)
    assert rows[0]["dtype"] == "bfloat16"
    assert np.array_equal(tensor(capture, rows[0]), value)


def test_ranks_are_sorted_as_numbers_and_steps_have_folders(tmp_path: Path) -> None:
    for rank in (2, 10):
        for step in (0, 5):
            writers.ptdbg(tmp_path / "dump", "6.0", rank=rank, step=step)
    result, rows, _ = imported(tmp_path / "dump", tmp_path)
    assert (result.ranks, result.steps) == (2, 2)
    assert {(row["rank"], row["step"]) for row in rows} == {(2, 0), (2, 5), (10, 0), (10, 5)}
    assert not any("no folders of steps" in note for note in result.notes)


def test_a_fault_in_one_of_two_dumps_is_found(tmp_path: Path) -> None:
    for name, fault in (("base", 0.0), ("cand", 0.25)):
        imported(writers.ptdbg(tmp_path / name / "dump", fault=fault), tmp_path / name)
    result = trueup.compare(tmp_path / "base" / "capture", tmp_path / "cand" / "capture")
    assert result.verdict == "deviates"
    assert result.culprit is not None
    assert (result.culprit.op, result.culprit.phase) == ("torch.nn.functional.relu", "forward")


# ---------------------------------------------------------------- damage
def test_damaged_lines_are_lost_and_the_rest_is_read(tmp_path: Path) -> None:
    root = writers.ptdbg(tmp_path / "dump", kind="statistics")
    path = next(root.rglob("dump.pkl"))
    lines = path.read_text().split("\n")
    lines[0] = lines[0][:-9]
    lines[3] = '["nameless", 1, [], "torch.float32", [2], [1, 2, 3]]'
    lines[4] = json.dumps({"a": 1})
    path.write_text("\n".join(lines)[:-20])
    result, rows, _ = imported(root, tmp_path)
    assert len(rows) == 15 - 4
    assert sorted(line.split(":")[0] for line in result.lost) == [
        "a line is cut off", "a line is no JSON", "a line is no row", "a row has a name of no known form",
    ]  # fmt: skip


def test_missing_truncated_and_foreign_tensor_files_are_lost(tmp_path: Path) -> None:
    root = writers.ptdbg(tmp_path / "dump")
    folder = next(root.rglob("dump.pkl")).with_suffix("")
    names = [f"Functional_linear_0_forward_input.{k}.npy" for k in range(3)]
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:-8])
    np.save(folder / names[2], np.array([{"a": 1}], object), allow_pickle=True)
    result, rows, _ = imported(root, tmp_path)
    assert sorted(line.split(":")[1].strip() for line in result.lost) == [
        "it holds Python objects or fields, which are never loaded", "its file is missing", "its header claims 60 bytes, 52 follow",
    ]  # fmt: skip
    assert [row["digest"] is None for row in rows[:4]] == [True, True, True, False]
    assert rows[0]["max"] is not None  # what its row says of it


def test_two_files_of_one_rank_are_told(tmp_path: Path) -> None:
    root = writers.ptdbg(tmp_path / "dump")
    path = next(root.rglob("dump.pkl"))
    (path.parent / "api_stack_dump.pkl").write_text(path.read_text())
    with pytest.raises(TrueupError, match=r"are both of rank 0, step 0: import one of them by its own path"):
        trueup.import_dump(root, tmp_path / "capture")
    result, _, _ = imported(path.parent / "api_stack_dump.pkl", tmp_path)
    assert result.calls == 5


def test_a_pickle_is_not_unpickled(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "dump.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "run").encode() + b"'\ntR.")
    with pytest.raises(TrueupError, match="is no dump that can be read"):
        trueup.import_dump(tmp_path / "dump", tmp_path / "capture")
    assert not (tmp_path / "run").exists()
