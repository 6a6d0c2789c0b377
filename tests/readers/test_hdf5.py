"""torch.utils.dumper's HDF5 files, written by the rules of its source."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import trueup
from readers import writers
from readers.captures import find, imported, tensor
from trueup import TrueupError


def test_operators_arguments_and_tensors(tmp_path: Path) -> None:
    result, rows, capture = imported(writers.hdf5(tmp_path / "model_npu.h5"), tmp_path)
    assert (result.tool, result.lost, result.calls) == ("torch.utils.dumper", [], 4)
    linear, relu, *_ = writers.run()
    result_row = find(rows, op="aten::addmm", slot="output.result")
    assert np.array_equal(tensor(capture, result_row), linear.outputs[0])
    assert (result_row["device"], result_row["strides"], result_row["level"]) == ("npu", [5, 1], "aten")
    assert find(rows, op="aten::addmm", slot="arguments")["value"] == '{"alpha": 1.0}'
    assert find(rows, op="aten::addmm", slot="input.input")["foreign_name"] == "addmm/1/input/self"
    assert np.array_equal(tensor(capture, find(rows, slot="input.tensors.1")), relu.outputs[0][1])


def test_half_that_was_stored_as_float_is_half_again(tmp_path: Path) -> None:
    _, rows, _ = imported(writers.hdf5(tmp_path / "model.h5"), tmp_path)
    assert find(rows, slot="input.grad")["dtype"] == "float16"


def test_dumps_of_two_devices_compare(tmp_path: Path) -> None:
    for name, device in (("npu", 10), ("gpu", 1)):
        imported(writers.hdf5(tmp_path / f"{name}.h5", device), tmp_path / name)
    result = trueup.compare(tmp_path / "gpu" / "capture", tmp_path / "npu" / "capture")
    assert (result.verdict, result.counts["compared"]) == ("aligned", 4)


def test_calls_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for seqid, op in ((10, "mul"), (9, "add"), (100, "add")):
            file[f"{op}/{seqid}/output/result"] = np.full(3, seqid, np.float32)
    _, rows, _ = imported(tmp_path / "a.h5", tmp_path)
    found = [(row["op"], row["ordinal"], row["max"]) for row in rows]
    assert found == [("aten::add", 0, 9), ("aten::mul", 0, 10), ("aten::add", 1, 100)]


def test_links_and_bytes_in_other_files_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    with h5py.File(secret / "secret.h5", "w") as file:
        file["add/1/output/result"] = np.full(3, 7, np.float32)
    (secret / "raw").write_bytes(np.full(3, 7, np.float32).tobytes())
    path = writers.hdf5(tmp_path / "model.h5")
    with h5py.File(path, "a") as file:
        file["evil"] = h5py.ExternalLink(str(secret / "secret.h5"), "/add")
        file["soft"] = h5py.SoftLink("/relu")
        file["relu/2/output/linked"] = h5py.ExternalLink(str(secret / "secret.h5"), "/add/1/output/result")
        file.create_dataset("relu/2/output/raw", (3,), "f4", external=[(str(secret / "raw"), 0, h5py.h5f.UNLIMITED)])
        layout = h5py.VirtualLayout((3,), "f4")
        layout[:] = h5py.VirtualSource(str(secret / "secret.h5"), "/add/1/output/result", (3,))
        file.create_virtual_dataset("relu/2/output/virtual", layout)
    result, rows, _ = imported(path, tmp_path)
    assert not [row for row in rows if row["max"] == 7.0]
    assert sorted(result.lost) == [
        "links in HDF5 files are not followed (3 times, first: //evil)",
        "tensors could not be read: its bytes lie in other files, which are not opened (2 times, first: relu/2/output/raw)",
    ]


def test_sizes_that_nothing_stands_behind_are_refused(tmp_path: Path) -> None:
    path = writers.hdf5(tmp_path / "model.h5")
    with h5py.File(path, "a") as file:
        file.create_dataset("relu/2/output/huge", (1 << 40,), "f8", chunks=(1 << 16,), compression="gzip")
    result, _, _ = imported(path, tmp_path)
    assert result.lost[0].startswith("tensors could not be read: it claims 8,796,093,022,208 bytes in a file of 0")


def test_a_group_that_holds_itself_ends(tmp_path: Path) -> None:
    path = writers.hdf5(tmp_path / "model.h5")
    with h5py.File(path, "a") as file:
        file["relu/2/output/loop"] = file["relu/2/output"]
    result, _, _ = imported(path, tmp_path)
    assert any("groups deeper than" in note for note in result.notes)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_told(tmp_path: Path, share: float) -> None:
    path = writers.hdf5(tmp_path / "model.h5")
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(TrueupError, match=r"though it is of torch.utils.dumper: the file is damaged: OSError: .*truncated"):
        trueup.import_dump(path, tmp_path / "capture")


def test_without_h5py_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = writers.hdf5(tmp_path / "model.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(TrueupError, match=r"model.h5 is an HDF5 file: install h5py to read it, pip install 'trueup\[hdf5\]'"):
        trueup.import_dump(path, tmp_path / "capture")
