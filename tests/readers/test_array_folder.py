"""Folders of .npy, .npz and .pt files, honest and hostile."""

from __future__ import annotations

import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
from readers import writers
from readers.captures import find, imported, tensor
from trueup import TrueupError


def test_files_members_and_keys_are_tensors(tmp_path: Path) -> None:
    result, rows, capture = imported(writers.arrays(tmp_path / "dump", torch), tmp_path)
    assert (result.tool, result.framework, result.lost) == ("a folder of arrays", None, [])
    assert {(r["rank"], r["scope"], r["slot"], r["dtype"]) for r in rows} == {
        (1, "encoder.fc", "output.1", "float32"), (1, "state", "output.a", "float32"), (1, "state", "output.b", "float32"),
        (1, "big_endian", "output.0", "float32"), (1, "model", "output.w", "bfloat16"), (1, "model", "output.list.0", "float32"),
    }  # fmt: skip
    linear, relu, *_ = writers.run()
    for slot, value in (("output.1", linear.outputs[0]), ("output.b", linear.inputs[1]), ("output.0", relu.outputs[0])):
        assert np.array_equal(tensor(capture, find(rows, slot=slot)), value)


DTYPES = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int8", "int64", "bool", "complex64")


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_pytorch_is_read_bit_by_bit(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    value = (torch.arange(12) % 5).to(getattr(torch, name)).reshape(3, 4)
    torch.save(value.t(), folder / "a.pt")
    _, rows, capture = imported(folder, tmp_path)
    assert (rows[0]["dtype"], rows[0]["shape"]) == (name, [4, 3])
    assert tensor(capture, rows[0]).tobytes() == bytes(value.t().contiguous().reshape(-1).view(torch.uint8).numpy())


def refused(tmp_path: Path, name: str, raw: bytes) -> str:
    """Return why a file could not be read; a good one lies beside it."""
    folder = tmp_path / "dump"
    folder.mkdir(exist_ok=True)
    np.save(folder / "good.npy", np.ones(3, np.float32))
    (folder / name).write_bytes(raw)
    result, rows, _ = imported(folder, tmp_path)
    assert find(rows, scope="good")["digest"] is not None
    assert [row["digest"] for row in rows if row["scope"] != "good"] in ([], [None])
    (line,) = result.lost
    return line


def npy(shape: str, dtype: str = "'<f8'", data: bytes = b"") -> bytes:
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (npy("(1099511627776,)", data=bytes(64)), "its header claims 8,796,093,022,208 bytes, 64 follow"),
        (npy("(-1,)", data=bytes(64)), "impossible sizes"),
        (npy("(4611686018427387904, 4, 4)"), "claims"),
        (npy("(3,)", "'|O'", bytes(24)), "Python objects"),
        (npy("(3,)", "[('a', '<f4')]", bytes(12)), "Python objects or fields"),
        (npy("(3,)", "'<U4'", bytes(48)), "holds no numbers"),
        (npy("(3,)", "'<M8[s]'", bytes(24)), "holds no numbers"),
        (npy("(3,)", "'|V8'", bytes(24)), "no statistics for dtype"),
        (npy("(" * 2000), "its header is damaged"),
        (npy("__import__('os').system('true')"), "its header is damaged"),
        (b"\x93NUMPY\x09\x00", "version (9, 0)"),
        (b"\x93NUMPY", "its header is damaged"),
    ],
)  # fmt: skip
def test_hostile_npy(tmp_path: Path, raw: bytes, why: str) -> None:
    assert why in refused(tmp_path, "bad.npy", raw)


def zipped(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    raw = path.read_bytes()
    path.unlink()
    return raw


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    bomb = zipped(tmp_path / "z", {"a.npy": npy("(37500000,)", data=bytes(300_000_000))})
    assert len(bomb) < 400_000
    assert "it claims 300,000,000 bytes in a file of 29" in refused(tmp_path, "bomb.npz", bomb)


def test_a_member_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    raw = zipped(tmp_path / "z", {"a.npy": npy("(1000,)", data=bytes(800))})
    assert "its header claims 8,000 bytes, 800 follow" in refused(tmp_path, "short.npz", raw)


def test_members_with_paths_stay_names(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "a.npz").write_bytes(zipped(tmp_path / "z", {"../../evil.npy": npy("(1,)", data=bytes(8))}))
    _, rows, _ = imported(folder, tmp_path)
    assert rows[0]["slot"] == "output.../../evil"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["capture", "dump"]


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


def test_a_pt_file_with_code_is_not_run(tmp_path: Path) -> None:
    torch.save(Evil(), tmp_path / "evil")
    assert "exec, which would run when the file is loaded" in refused(tmp_path, "evil.pt", (tmp_path / "evil").read_bytes())


def test_a_pt_file_of_the_old_format_is_not_unpickled(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "old", _use_new_zipfile_serialization=False)
    assert "BadZipFile" in refused(tmp_path, "old.pt", (tmp_path / "old").read_bytes())


def test_a_pt_file_with_packed_members_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(100_000), tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert "packed, which torch.save never does" in refused(tmp_path, "packed.pt", zipped(tmp_path / "z", members))


def test_a_view_of_terabytes_over_one_element_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(1).expand(1 << 40), tmp_path / "view")
    assert "it claims 4,398,046,511,104 bytes" in refused(tmp_path, "view.pt", (tmp_path / "view").read_bytes())


@pytest.mark.parametrize("kind", ["sparse", "string"])
def test_what_is_no_plain_tensor_is_told(tmp_path: Path, kind: str) -> None:
    torch.save(torch.eye(3).to_sparse() if kind == "sparse" else "text", tmp_path / "odd")
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "odd.pt").write_bytes((tmp_path / "odd").read_bytes())
    with pytest.raises(TrueupError, match="holds nothing that can be read, though it is of a folder of arrays"):
        trueup.import_dump(folder, tmp_path / "capture")


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    import os

    folder = tmp_path / "dump"
    folder.mkdir()
    np.save(tmp_path / "secret.npy", np.full(3, 7.0))
    np.save(folder / "good.npy", np.ones(3))
    (folder / "link.npy").symlink_to(tmp_path / "secret.npy")
    (folder / "folder").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(folder / "pipe.npy")
    result, rows, _ = imported(folder, tmp_path)
    assert [row["scope"] for row in rows] == ["good"]
    assert sorted(result.notes) == ["links are not followed (2 times, first: folder)", "pipes and devices are not read: pipe.npy"]


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    folder = tmp_path / "dump"
    folder.mkdir()
    for k in range(40):
        np.save(folder / f"{k}.npy", np.full(1 << 20, k, np.float64))  # 320 MB together
    tracemalloc.start()
    result, _, _ = imported(folder, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.tensors == 40
    assert peak < 150 << 20


def test_reading_arrays_does_not_import_pytorch(tmp_path: Path) -> None:
    import subprocess

    folder = writers.arrays(tmp_path / "dump")
    torch.save(torch.ones(3), folder / "a.pt")
    code = f"import sys, trueup; trueup.import_dump({str(folder)!r}, {str(tmp_path / 'c')!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", code]) == 0
