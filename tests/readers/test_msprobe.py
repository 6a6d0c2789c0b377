"""Dumps that msprobe itself wrote, of every level and task."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
from readers import record_msprobe
from readers.captures import Row, find, imported, tensor
from trueup import TrueupError

KINDS = [*record_msprobe.KINDS, *(f"{name}-fault" for name in record_msprobe.FAULTY)]


def entries(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Return what dump.json holds, by rank and step."""
    found = {}
    for path in folder.rglob("dump.json"):
        rank = path.parent.name
        at = int(rank[4:]) if rank.startswith("rank") else 0, int(path.parent.parent.name[4:])
        found[at] = json.loads(path.read_text())["data"]
    return found


def leaves(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner)]
    if isinstance(value, dict) and "dtype" not in value:
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [value] if isinstance(value, dict) else []


def step_of(folder: Path) -> Path:
    return next(folder.rglob("dump.json")).parent


def is_a_modules(row: Row) -> bool:
    """Tell whether a row is a function's gradient that the dump has with the module around it."""
    return row["level"] == "api" and (row["foreign_name"] or "").startswith("Module.")


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_the_dump_is_a_row_and_every_row_a_tensor_of_it(dumps: Path, tmp_path: Path, kind: str) -> None:
    result, rows, _ = imported(dumps / kind, tmp_path)
    assert result.lost == []
    told = [(at, leaf) for at, data in entries(dumps / kind).items() for entry in data.values() for leaf in leaves(entry)]
    slots = [row for row in rows if row["slot"] != "arguments" and not is_a_modules(row)]
    assert len(told) == len(slots) > 90
    assert {row["foreign_name"] for row in rows if is_a_modules(row)} <= {row["foreign_name"] for row in slots}
    assert any(map(is_a_modules, rows)) == kind.removesuffix("-fault").endswith("-mix")

    def described(at: tuple[int, int], dtype: str, shape: list[int]) -> tuple[Any, ...]:
        return (*at, dtype, *shape)

    expected = sorted(described(at, leaf["dtype"].removeprefix("torch."), leaf["shape"]) for at, leaf in told)
    assert expected == sorted(described((row["rank"], row["step"]), row["dtype"], row["shape"]) for row in slots)
    names = [(row["rank"], row["step"], row["seq"], row["slot"]) for row in rows]
    assert len(set(names)) == len(names)


def test_names_scopes_and_order_are_those_of_a_native_capture(dumps: Path, tmp_path: Path) -> None:
    _, rows, _ = imported(dumps / "tensor-mix", tmp_path)
    torch.manual_seed(1234)
    model, ids = record_msprobe.build()
    with trueup.capture(tmp_path / "native", model=model, level=["module", "api"], steps="0:1"):
        record_msprobe.loss_of(model, ids).backward()
    native = trueup.open_capture(tmp_path / "native").records().to_pylist()

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("phase", "level", "scope", "op", "ordinal", "slot", "dtype")), tuple(row["shape"] or ())

    ours = {key(row): row for row in rows if row["slot"] != "arguments" and ".node." not in row["slot"]}
    theirs = {key(row): row for row in native}
    unknown = [k for k in ours if k not in theirs and not k[0][5].startswith(("grad_param", "grad_input", "grad_output"))]
    assert unknown == []
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 150
    forward = sorted((k for k in shared if k[0][0] == "forward"), key=lambda k: ours[k]["seq"])
    assert [theirs[k]["seq"] for k in forward] == sorted(theirs[k]["seq"] for k in forward)
    for k in shared:
        assert ours[k]["l2"] == pytest.approx(theirs[k]["l2"], rel=1e-4, abs=1e-7)
    arguments = {key(row)[0]: row["value"] for row in native if row["slot"] == "arguments"}
    gelu = find(rows, scope="layers.0.act", slot="arguments", phase="forward")
    assert arguments[key(gelu)[0]] == gelu["value"] == '{"approximate": "none"}'


def test_parents_forward_calls_and_stacks(dumps: Path, tmp_path: Path) -> None:
    _, rows, capture = imported(dumps / "statistics-mix", tmp_path)
    linear = find(rows, scope="layers.1.attn.qkv", level="api", phase="forward", slot="output.0")
    module = find(rows, scope="layers.1.attn.qkv", level="module", phase="forward", slot="output.0")
    attention = find(rows, scope="layers.1.attn", op="Attention", phase="forward", slot="output.0")
    assert (linear["parent"], module["parent"]) == (module["seq"], attention["seq"])
    assert linear["seq"] > module["seq"] > attention["seq"]  # a module begins before what it calls
    backward = find(rows, scope="layers.1.attn.qkv", level="module", phase="backward", slot="grad_output.0")
    assert backward["forward_seq"] == module["seq"]
    assert backward["seq"] == find(rows, scope="layers.1.attn.qkv", slot="grad_param.weight")["seq"]
    frames, text = capture.sites(0)[find(rows, op="torch.softmax", scope="layers.0.attn", phase="forward", slot="output.0")["site"]]
    assert frames[0].startswith("/home/user/record_msprobe.py:")
    assert frames[0].endswith(" in forward")
    assert "softmax" in str(text)
    assert not any("site-packages/torch" in frame for frame in frames)


def test_statistics_are_kept_where_they_mean_the_same(dumps: Path, tmp_path: Path) -> None:
    _, rows, _ = imported(dumps / "statistics-mix", tmp_path)
    told = entries(dumps / "statistics-mix")[0, 0]["Functional.gelu.0.forward"]["output"][0]
    row = find(rows, op="torch.nn.functional.gelu", scope="layers.0.act", phase="forward", slot="output.0")
    assert (row["max"], row["min"], row["mean"], row["l2"]) == (told["Max"], told["Min"], told["Mean"], told["Norm"])
    assert (row["n_nan"], row["n_posinf"], row["n_neginf"]) == (0, 0, 0)
    assert [row[name] for name in ("n_zero", "n_subnormal", "n_saturated", "digest", "sketch", "payload_key")] == [None] * 6
    masked = find(rows, op="torch.Tensor.masked_fill", scope="layers.0.attn", phase="forward", slot="output.0")
    assert [masked[name] for name in ("min", "max", "mean", "l2", "n_nan", "n_neginf")] == [None] * 6
    assert json.loads(masked["foreign_statistics"])["min"] == "-inf"
    mask = find(rows, op="torch.Tensor.masked_fill", scope="layers.0.attn", phase="forward", slot="input.1")
    assert (mask["dtype"], mask["max"], mask["min"], mask["mean"]) == ("bool", 1.0, 0.0, None)


def test_a_function_has_the_gradients_of_the_module_that_is_nothing_else(dumps: Path, tmp_path: Path) -> None:
    """But a weight's, where something else of the step reads the weight too, and where nothing shows that .grad held no more."""
    names = {"grad_output.0", "grad_input.node.0", "grad_input.0", "grad_input.1", "grad_input.2"}
    weights = {"grad_input.1", "grad_input.2"}

    def slots(change: Any, at: str) -> set[str]:
        shutil.copytree(dumps / "statistics-mix", tmp_path / at / "dump")
        (path,) = (tmp_path / at / "dump").rglob("dump.json")
        content = json.loads(path.read_text())
        change(content["data"])
        path.write_text(json.dumps(content))
        _, rows, _ = imported(tmp_path / at / "dump", tmp_path / at)
        wanted = ("backward", "torch.nn.functional.linear", "layers.1.fc")
        return {row["slot"] for row in rows if (row["phase"], row["op"], row["scope"]) == wanted}

    def tied(data: dict[str, Any]) -> None:
        data["Functional.linear.6.forward"]["input_args"][1] |= data["Functional.linear.5.forward"]["input_args"][1]

    def untrained(data: dict[str, Any]) -> None:
        """As biases begin: those of two layers are equal, and are not the same."""
        for k in (2, 5):
            data[f"Functional.linear.{k}.forward"]["input_args"][2] |= dict.fromkeys(("Max", "Min", "Mean", "Norm"), 0.0)
        for name in ("Module.layers.0.fc.Linear.forward.0", "Module.layers.1.fc.Linear.forward.0"):
            data[name]["parameters"]["bias"] |= dict.fromkeys(("Max", "Min", "Mean", "Norm"), 0.0)

    def unproven(data: dict[str, Any]) -> None:
        for name in [name for name in data if ".LayerNorm.parameters_grad." in name or ".Embedding.parameters_grad." in name]:
            del data[name]

    def something_between(data: dict[str, Any]) -> None:
        data["Module.layers.1.fc.Linear.forward.0"]["output"][0]["Norm"] *= 2

    assert slots(lambda data: None, "plain") == names
    assert slots(tied, "tied") == names - {"grad_input.1"}
    assert slots(untrained, "untrained") == names
    assert slots(unproven, "unproven") == names - weights
    assert slots(something_between, "between") == {"grad_output.0", "grad_input.node.0"}


def test_tensors_are_measured_by_our_kernels_and_kept(dumps: Path, tmp_path: Path) -> None:
    result, rows, capture = imported(dumps / "tensor-mix", tmp_path)
    folder = step_of(dumps / "tensor-mix") / "dump_tensor_data"
    assert result.tensors == len(list(folder.iterdir())) + sum(map(is_a_modules, rows)) > 200
    for row in rows:
        if row["slot"] == "arguments":
            continue
        told = torch.load(folder / f"{row['foreign_name']}.pt", weights_only=True).numpy()
        assert np.array_equal(tensor(capture, row), told)
        finite = told[np.isfinite(told)].astype(np.float64)
        assert row["l2"] == pytest.approx(float(np.linalg.norm(finite)), rel=1e-12)
        assert row["digest"] is not None
        assert row["sketch"] is not None


def test_checksums_are_those_of_the_bytes(dumps: Path, tmp_path: Path) -> None:
    _, rows, capture = imported(dumps / "tensor-md5-L0", tmp_path)
    slots = [row for row in rows if row["slot"] != "arguments"]
    for row in slots:
        assert row["foreign_checksum"] == f"crc32:{zlib.crc32(tensor(capture, row).tobytes()):08x}"
    _, rows, _ = imported(dumps / "xor-mix", tmp_path / "xor")
    scalar = find(rows, op="torch.nn.functional.cross_entropy", phase="forward", slot="output.0")
    assert [row["slot"] for row in rows if row["foreign_checksum"] is None and row["dtype"] and row["shape"]] == []
    assert scalar["l2"] == scalar["max"] == scalar["mean"] > 2  # msprobe gives a scalar's value in place of its XOR
    assert all((row["foreign_checksum"] or "xor64:").startswith("xor64:") for row in rows)


def test_equal_checksums_tell_two_runs_of_the_tool_apart_where_they_differ(dumps: Path, tmp_path: Path) -> None:
    for kind in ("md5-L1", "xor-mix"):
        sides = [imported(dumps / f"{kind}{end}", tmp_path / f"{kind}{end}")[1] for end in ("", "-fault")]
        pairs = [
            (b["op"], b["slot"]) for b, c in zip(*sides, strict=True) if b["foreign_checksum"] != c["foreign_checksum"]
        ]  # fmt: skip
        assert pairs[0] == ("torch.nn.functional.gelu", "output.0") or pairs[0][0] in ("Block", "GELU")
        assert 20 < len(pairs) < len(sides[0])


def test_ranks_and_steps_are_told_apart(dumps: Path, tmp_path: Path) -> None:
    result, rows, capture = imported(dumps / "ranks-mix", tmp_path)
    assert (result.ranks, result.steps) == (2, 2)
    assert {(row["rank"], row["step"]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert [capture.ranks[rank]["world_size"] for rank in (0, 1)] == [2, 2]
    reduced = [row for row in rows if row["phase"] == "collective" and row["slot"] == "output.0" and row["step"] == 0]
    assert [row["op"] for row in reduced] == ["torch.distributed.all_reduce"] * 2
    assert reduced[0]["l2"] == reduced[1]["l2"]
    zero, one = (max(r["seq"] for r in rows if r["step"] == step and r["rank"] == 0) for step in (0, 1))
    assert one > zero


def test_recomputed_calls_are_told_from_forward_calls(dumps: Path, tmp_path: Path) -> None:
    _, rows, _ = imported(dumps / "recompute-mix", tmp_path)
    forward, again = (
        {(r["scope"], r["op"], r["ordinal"]) for r in rows if r["phase"] == phase and r["level"] == "module"}
        for phase in ("forward", "recompute")
    )
    assert ("layers.1", "Block", 0) in again
    assert again < forward


def test_what_is_lacking_is_said(dumps: Path, tmp_path: Path) -> None:
    result, _, capture = imported(dumps / "md5-L1", tmp_path)
    assert any("scopes are unknown" in sentence for sentence in result.lacks)
    assert any("no sketches" in sentence for sentence in result.lacks)
    assert any("checksums are the tool's own" in sentence for sentence in result.lacks)
    assert capture.ranks[0]["imported"]["lacks"] == list(result.lacks)


def test_imported_tensors_of_two_runs_lead_to_the_culprit(dumps: Path, tmp_path: Path) -> None:
    for end in ("", "-fault"):
        imported(dumps / f"tensor-mix{end}", tmp_path / f"run{end}")
    runs = [tmp_path / f"run{end}" / "capture" for end in ("", "-fault")]
    result = trueup.compare(*runs)
    assert result.culprit is not None
    assert (result.verdict, result.culprit.scope, result.culprit.op) == ("deviates", "layers.0.act", "torch.nn.functional.gelu")
    assert trueup.compare(runs[0], runs[0]).verdict == "aligned"


def test_a_native_capture_compares_with_a_dump_as_far_as_both_go(dumps: Path, tmp_path: Path) -> None:
    torch.manual_seed(1234)
    model, ids = record_msprobe.build()
    with trueup.capture(tmp_path / "native", model=model, level=["module", "api"], steps="0:1"):
        record_msprobe.loss_of(model, ids).backward()
    imported(dumps / "tensor-mix", tmp_path / "same")
    same = trueup.compare(tmp_path / "native", tmp_path / "same" / "capture")
    assert (same.verdict, same.counts["equal"] + same.counts["agrees"]) == ("aligned", same.counts["compared"])
    assert same.counts["compared"] >= 80
    assert same.counts["equal"] > 0  # on the processor that the dump was made on, all
    imported(dumps / "tensor-mix-fault", tmp_path / "fault")
    fault = trueup.compare(tmp_path / "native", tmp_path / "fault" / "capture")
    assert fault.culprit is not None
    assert (fault.culprit.scope, fault.culprit.op) == ("layers.0.act", "torch.nn.functional.gelu")


# ---------------------------------------------------------------- damage
def copied(dumps: Path, tmp_path: Path, kind: str) -> tuple[Path, Path]:
    shutil.copytree(dumps / kind, tmp_path / "dump")
    return tmp_path / "dump", step_of(tmp_path / "dump")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95, 0.9999])
def test_a_dump_that_was_cut_off_gives_all_whole_entries(dumps: Path, tmp_path: Path, share: float) -> None:
    root, step = copied(dumps, tmp_path, "statistics-L1")
    path = step / "dump.json"
    text = path.read_text()
    names = list(json.loads(text)["data"])
    cut = text[: int(len(text) * share)]
    path.write_text(cut)
    whole = sum(f'"{following}"' in cut for following in names[1:])  # the last is never whole here
    for other in root.glob("step*"):
        if other != step.parent:
            shutil.rmtree(other)
    result, rows, _ = imported(root, tmp_path)
    assert whole <= len({row["seq"] for row in rows}) <= whole + 1
    assert result.lost == [f"dump.json was read as far as it is whole: it ends too early: {path.relative_to(root)}"]


def test_nothing_is_left_of_a_dump_that_was_killed_before_its_first_flush(dumps: Path, tmp_path: Path) -> None:
    root, step = copied(dumps, tmp_path, "statistics-mix")
    (step / "dump.json").write_text('{\n "task": "statistics",\n "level": "mix",\n "framework": "pytorch",\n "data": {}\n}')
    with pytest.raises(TrueupError, match=r"holds nothing that can be read, though it is of msprobe: "):
        trueup.import_dump(root, tmp_path / "capture")
    assert not (tmp_path / "capture").exists()


def test_bare_nan_and_infinity_are_numbers(dumps: Path, tmp_path: Path) -> None:
    root, step = copied(dumps, tmp_path, "statistics-mix")
    path = step / "dump.json"
    data = json.loads(path.read_text())
    told = data["data"]["Functional.gelu.0.forward"]["output"][0]
    told |= {"Max": math.nan, "Min": math.nan, "Mean": math.nan, "Norm": math.nan}
    path.write_text(json.dumps(data))
    result, rows, _ = imported(root, tmp_path)
    row = find(rows, op="torch.nn.functional.gelu", scope="layers.0.act", phase="forward", slot="output.0")
    assert result.lost == []
    assert json.loads(row["foreign_statistics"])["max"] == "nan"
    assert row["n_nan"] is None


def test_missing_and_corrupt_tensor_files_leave_their_rows_and_are_lost(dumps: Path, tmp_path: Path) -> None:
    root, step = copied(dumps, tmp_path, "tensor-mix")
    folder = step / "dump_tensor_data"
    (folder / "Functional.gelu.0.forward.output.0.pt").unlink()
    (folder / "Torch.softmax.0.forward.output.0.pt").write_bytes(b"PK\x03\x04 and no more")
    result, rows, capture = imported(root, tmp_path)
    assert sorted(result.lost)[1].endswith("its file is missing: Functional.gelu.0.forward.output.0")
    assert len(result.lost) == 2
    assert capture.ranks[0]["imported"]["lost"] == list(result.lost)
    for op in ("torch.nn.functional.gelu", "torch.softmax"):
        row = find([r for r in rows if r["scope"].startswith("layers.0")], op=op, phase="forward", slot="output.0")
        assert (row["digest"], row["payload_key"], row["sketch"]) == (None, None, None)
        assert row["l2"] > 0  # what dump.json said of it
    clean = tmp_path / "clean"
    imported(dumps / "tensor-mix", clean)
    assert trueup.compare(clean / "capture", tmp_path / "capture").verdict == "inconclusive"


def test_a_tensor_of_another_shape_than_the_record_is_not_taken_for_it(dumps: Path, tmp_path: Path) -> None:
    root, step = copied(dumps, tmp_path, "tensor-mix")
    folder = step / "dump_tensor_data"
    shutil.copy(folder / "Functional.embedding.0.forward.input.1.pt", folder / "Functional.gelu.0.forward.output.0.pt")
    result, rows, _ = imported(root, tmp_path)
    row = find(rows, op="torch.nn.functional.gelu", scope="layers.0.act", phase="forward", slot="output.0")
    assert row["digest"] is None
    assert "a different shape" in result.lost[0]


def test_names_that_lead_out_of_the_dump_are_missing_files(dumps: Path, tmp_path: Path) -> None:
    root, step = copied(dumps, tmp_path, "tensor-mix")
    secret = tmp_path / "secret.pt"
    torch.save(torch.full((2, 4, 8), 7.0), secret)
    path = step / "dump.json"
    data = json.loads(path.read_text())
    for k, name in enumerate((str(secret), "../../../../secret.pt", "link.pt")):
        data["data"][f"Functional.gelu.{k % 2}.{'forward' if k < 2 else 'backward'}"]["output"][0]["data_name"] = name
    (step / "dump_tensor_data" / "link.pt").symlink_to(secret)
    path.write_text(json.dumps(data))
    result, rows, _ = imported(root, tmp_path)
    assert any("its file is missing (3 times" in line for line in result.lost)
    assert any("links are not followed" in line for line in result.notes)
    assert not [row for row in rows if row["max"] == 7.0]


def test_stack_and_construct_may_be_absent(dumps: Path, tmp_path: Path) -> None:
    root, step = copied(dumps, tmp_path, "statistics-mix")
    for name in ("stack.json", "construct.json"):
        (step / name).unlink()
    result, rows, _ = imported(root, tmp_path)
    assert {row["site"] for row in rows} == {None}
    assert sum("there is no" in note for note in result.notes) == 2


def test_the_first_layout_of_stacks_is_read(dumps: Path, tmp_path: Path) -> None:
    root, step = copied(dumps, tmp_path, "statistics-mix")
    (step / "stack.json").write_text(json.dumps({
        "Torch.softmax.0.forward": ["File /home/user/a.py, line 3, in forward, \n x = torch.softmax(x, 1)"],
    }))  # fmt: skip
    _, rows, capture = imported(root, tmp_path)
    site = find(rows, op="torch.softmax", scope="layers.0.attn", phase="forward", slot="output.0")["site"]
    assert capture.sites(0)[site] == (("/home/user/a.py:3 in forward",), "x = torch.softmax(x, 1)")


def test_two_dumps_in_one_folder_are_not_mixed(dumps: Path, tmp_path: Path) -> None:
    with pytest.raises(TrueupError, match=r"there are \d+ dumps, in 'md5-L1', .*: import one of them at a time"):
        trueup.import_dump(dumps, tmp_path / "capture")


def test_one_file_alone_is_a_dump(dumps: Path, tmp_path: Path) -> None:
    result, rows, _ = imported(step_of(dumps / "statistics-mix") / "dump.json", tmp_path)
    assert (result.ranks, result.steps) == (1, 1)
    assert len(rows) > 100
