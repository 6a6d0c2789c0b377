"""torch.utils.dumper over a capture: its files, golden inputs, overflow, and the comparison of two files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import trueup
from compat import pasting, small
from readers.captures import imported, tensor
from readers.kernel_writers import kernel
from trueup import TrueupError, simdev
from trueup.foundation.kernels.metrics import Msaccucmp
from trueup_compat.dumper import compare, dumper, extract, install
from trueup_compat.dumper.__main__ import main
from trueup_compat.dumper.comparing import COLUMNS
from trueup_compat.dumper.converting import convert

FAULT = "layer-norm-backward"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    if hasattr(torch.utils, "dumper"):
        del torch.utils.dumper


def pasted(name: str, device: str, **names: Any) -> None:
    """Run a block of the guide with forward and backward code where it has ``xxx``; the optimizer is never reached."""
    block = pasting.blocks("dumper")[name].replace("xxx # forward code", "loss = forward(data)")
    block = block.replace("xxx # backward code", "loss.backward()").replace("xxx # optimizer code", "raise AssertionError")
    net = small.model(device)
    torch.manual_seed(4)
    batch = torch.randn(5, 6)

    def forward(data: torch.Tensor) -> torch.Tensor:
        return net(data.to(device)).pow(2).sum()

    install()
    with pytest.raises(SystemExit):
        exec(block, {"torch": torch, "dataloader": [batch], "forward": forward, "exit": exit, **names})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def groups(path: str) -> dict[str, Any]:
    """Return the calls of a file: group -> names of its datasets."""
    found: dict[str, list[str]] = {}
    with h5py.File(path, "r") as file:
        file.visititems(lambda name, item: found.setdefault("/".join(name.split("/")[:2]), []).append(name)
                        if isinstance(item, h5py.Dataset) else None)  # fmt: skip
    return found


def test_a_file_has_each_operator_in_the_tool_s_layout(tmp_path: Path) -> None:
    pasted("dump", "cpu")
    found = groups("model_gpu.h5")
    (linear, *_) = sorted((name for name in found if name.startswith("addmm/")), key=lambda name: int(name.split("/")[1]))
    assert {f"{linear}/input/{name}" for name in ("self", "mat1", "mat2")} | {f"{linear}/output/result"} == set(found[linear])
    with h5py.File("model_gpu.h5", "r") as file:
        weight = file[f"{linear}/input/mat2"]
        assert np.array_equal(weight[()], small.model().first.weight.detach().T.numpy())
        assert [weight.attrs[name] for name in ("DeviceType", "DataType", "Type")] == [0, 1, 0]
        assert weight.attrs["Stride"].tolist() == [1, 6]
        norm = next(name for name in found if name.startswith("native_layer_norm/"))
        assert file[f"{norm}/input/normalized_shape"][()].tolist() == [8]
        assert file[f"{norm}/input/normalized_shape"].attrs["Type"] == 2
    result, read, capture = imported(tmp_path / "model_gpu.h5", tmp_path)
    assert (result.lost, result.calls) == ([], len(found))
    native = trueup.open_capture("model_gpu.h5.trueup").records(level="aten").to_pylist()
    columns = ("phase", "scope", "op", "ordinal", "digest")
    wanted = {tuple(row[c] for c in columns) for row in native if row["dtype"] and row["slot"] == "output.0"}
    there = {tuple(row[c] for c in columns) for row in read if row["slot"].startswith("output.")}
    assert wanted <= there
    assert all(tensor(capture, row).size == row["numel"] for row in read if row["payload_segment"])


def test_loaded_inputs_leave_the_wrong_operator_alone(capsys: pytest.CaptureFixture[str]) -> None:
    pasted("dump", "cpu")
    with simdev.inject(FAULT):
        pasted("load", "npu")
    assert "load_file_path without use_load loaded nothing in torch.utils.dumper; here it loads" in capsys.readouterr().out
    written = groups("model_npu.h5")
    assert set(written) <= set(groups("model_gpu.h5"))
    assert not any("/input/" in name for names in written.values() for name in names)
    table, result = compare("model_npu.h5", "model_gpu.h5", "out")
    found = rows(table)
    assert tuple(found[0]) == COLUMNS
    wrong = {row["NPUDump"].partition(":")[0] for row in found if float(row["RelativeEuclideanDistance"]) > 1e-3}
    assert wrong == {"native_layer_norm_backward"}
    assert result.verdict == "deviates"
    assert result.culprit is not None
    assert result.culprit.op == "aten::native_layer_norm_backward"
    (report,) = Path("out").glob("trueup_report_*")
    assert json.loads((report / "verdict.json").read_text())["verdict"] == "deviates"


def test_whole_dumps_pair_by_occurrence_and_what_has_no_counterpart_has_a_row() -> None:
    net = small.model()
    with dumper(use_dump=True, dump_path="a.h5"):
        small.step(net)
    with dumper(use_dump=True, dump_path="b.h5"):
        small.step(net, scale=2.0)
        torch.tanh(torch.ones(3))
    found = rows(compare("b.h5", "a.h5")[0])
    sums = {row["NPUDumpPath"].rpartition("/")[2]: row for row in found if row["NPUDump"].startswith("addmm:")}
    assert float(sums["self"]["CosineSimilarity"]) == pytest.approx(1.0)
    assert float(sums["mat2"]["MaxAbsoluteError"]) == 0
    with h5py.File("a.h5") as a, h5py.File("b.h5") as b:
        row = next(row for row in found if row["NPUDump"].startswith("_softmax:") and "output" in row["NPUDumpPath"])
        truth = Msaccucmp.of(a[row["GroundTruthPath"]][()], b[row["NPUDumpPath"]][()])
    assert float(row["KullbackLeiblerDivergence"]) == pytest.approx(truth.kullback_leibler)
    assert float(row["AccumulatedRelativeError"]) == pytest.approx(truth.accumulated_relative)
    assert row["StandardDeviation"].startswith("(0.333;")
    (alone,) = {row["CompareFailReason"] for row in found if row["NPUDump"].startswith("tanh:")}
    assert alone == "no such tensor in the golden file"


def test_an_operator_that_overflows_is_named_and_written_alone(capsys: pytest.CaptureFixture[str]) -> None:
    install()
    block = pasting.blocks("dumper")["overflow"] + "    run()\n"

    def run() -> None:
        half = torch.full((4,), 300.0, dtype=torch.float16)
        ((half + 1) * half).sum()

    exec(block, {"torch": torch, "check_overflow": True, "dump_path": "over.h5", "run": run})
    said = capsys.readouterr().out
    assert said.startswith("[overflow] IR name: mul/")
    assert "4 +Inf of 4 elements" in said
    (found,) = groups("over.h5")
    assert found.startswith("mul/")
    exec(block, {"torch": torch, "check_overflow": False, "dump_path": "none.h5", "run": run})
    assert not Path("none.h5").exists()


def test_operators_are_extracted_and_added(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with dumper(use_dump=True, dump_path="a.h5"):
        torch.cat([torch.ones(2), torch.zeros(3)]) @ torch.ones(5)
    first, second, *_ = sorted(groups("a.h5"), key=lambda name: name.startswith("cat"), reverse=True)
    assert groups("a.h5")[first][:2] == [f"{first}/input/tensors/tensors_0", f"{first}/input/tensors/tensors_1"]
    assert extract("a.h5", "sub.h5", f"/{first}/") == 1
    asked = ["dumper", "extract", "-pv", "-i", "a.h5", "-o", "sub.h5", "-s", f"/{second}/", "-d", second]
    monkeypatch.setattr("sys.argv", asked)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    monkeypatch.setattr("sys.argv", ["dumper", "extract", "-i", "a.h5", "-o", "b.h5", "-s", f"/{second}/", "-d", "/x/1/"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "an operator keeps its name" in capsys.readouterr().err
    assert {name: len(sets) for name, sets in groups("sub.h5").items()} == {n: len(groups("a.h5")[n]) for n in (first, second)}
    for group, message in (("x", "names no operator"), ("/cat/999/", "has no /cat/999/"), (f"/{first}/", "already")):
        with pytest.raises(TrueupError, match=message):
            extract("a.h5", "sub.h5", group)
    monkeypatch.setattr("sys.argv", ["dumper", "compare", "-m", "a.h5", "-g", "nothing.h5"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "nothing.h5 is no file" in capsys.readouterr().err


def _message(*fields: tuple[int, int | bytes]) -> bytes:
    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    return b"".join(
        varint(n << 3) + varint(v) if isinstance(v, int) else varint(n << 3 | 2) + varint(len(v)) + v for n, v in fields
    )


def test_dumps_of_kernels_become_numpy_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, made = np.arange(6, dtype=np.float16).reshape(2, 3), np.arange(300, dtype=np.float32).reshape(300, 1)
    packed, plain = _message((1, b"\x02\x03")), _message((1, 300), (1, 1))
    output, put = _message((1, 1), (2, 3), (3, plain), (6, made.nbytes + 32)), _message((1, 2), (2, 2), (3, packed), (5, 12))
    header = _message((1, b"2.0"), (3, output), (4, put))
    dumps, dump = tmp_path / "dump", "Pooling.pool1.1147.1589195081588018"
    dumps.mkdir()
    body = given.tobytes() + made.tobytes() + bytes(32)  # a device pads
    (dumps / dump).write_bytes(len(header).to_bytes(8, "little") + header + body)
    np.save(dumps / "add_.add_1.1.0.5.output.0.npy", given)
    (dumps / "cut").write_bytes(len(header).to_bytes(8, "little") + header + body[:9])
    (dumps / "none").write_bytes(b"\xff" * 40)
    main_of = ["msaccucmp.pyc", "convert", "-d", str(dumps), "-out", str(tmp_path / "numpy"), "-v", "2"]
    monkeypatch.setattr("sys.argv", main_of)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    said = capsys.readouterr().out.splitlines()
    expected = [f"{dump}.output.0 is in the private format NC1HWC0", "cut is no dump", "none is no dump"]
    assert [line.partition(":")[0] for line in said[-4:-1]] == expected
    assert said[-1].startswith("3 tensors in ")
    for slot, value in (("input.0", given), ("output.0", made)):
        assert np.array_equal(np.load(tmp_path / "numpy" / f"{dump}.{slot}.npy"), value)
    five = kernel(tmp_path / "five", (np.ones((2, 1, 3, 3, 16), np.float16), "NC1HWC0", (2, 9, 3, 3)))
    for options, ending in (("-f NHWC -s 2,3,3,9", "2x3x3x9.npy"), ("-f NCHW -t bin", "2_9_3_3.float16.NCHW.bin")):
        monkeypatch.setattr("sys.argv", ["x", "convert", "-d", f"{five},{five}", "-out", str(tmp_path), *options.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert (tmp_path / f"five.output.0.{ending}").is_file()
    for options in ("-f HCNW", "-s 1,2", "-f ND -o 0 -i 0", "-t pt", "-c scripts", "-f NCDHW"):
        monkeypatch.setattr("sys.argv", ["x", "convert", "-d", str(five), "-out", str(tmp_path), *options.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
    npy = str(tmp_path / "numpy" / f"{dump}.output.0.npy")
    for other, code in ((npy, 0), (str(tmp_path / "numpy" / "add_.add_1.1.0.5.output.0.npy"), 2)):
        monkeypatch.setattr("sys.argv", ["x", "file_compare", "-m", other, "-g", npy, "-out", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
    old = tmp_path / "old"  # version 1: the bytes are in the message
    old.write_bytes(_message((4, _message((1, 2), (3, packed), (4, given.tobytes())))))
    assert convert(old, tmp_path / "numpy", version=1) == (1, [])
    for wrong in (dumps / "none", old):
        with pytest.raises(TrueupError, match="nothing to convert"):
            convert(wrong, tmp_path / "numpy")


def test_training_is_bitwise_the_same() -> None:
    net = small.model()
    plain, grads = small.step(net), [p.grad.clone() for p in net.parameters()]
    net = small.model()
    with dumper(use_dump=True):
        dumped = small.step(net)
    assert torch.equal(plain, dumped)
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, net.parameters(), strict=True))
    assert len(list(Path().glob("20*.h5"))) == 1


def test_kernels_of_an_extracted_operator_are_dumped() -> None:
    """The guide's chapter: h5copy, its acl.json as it is printed, and a load on the device."""
    with dumper(use_dump=True, dump_path="a.h5"):
        small.step(small.model())
    wanted = next(name for name in groups("a.h5") if name.startswith("native_layer_norm/"))
    extract("a.h5", "output.h5", f"/{wanted}/")
    rest = '"dump_path":"./out"# where\n  "dump_mode":"all"\n  "dump_op_switch":"on"\n }\n}\n'
    Path("acl.json").write_text('{\n "dump":\n {\n  "dump_list":[]\n  ' + rest, "utf-8")
    with dumper(use_load=True, dump_path="b.h5", load_file_path="output.h5", load_with_acl_dump=True):
        small.step(small.model("npu"), "npu")
    dumped = sorted(path.name for path in Path("out").glob("*.npy"))
    assert {name.partition(".")[0] for name in dumped} == {"native_layer_norm"}
    assert [name.split(".", 5)[5] for name in dumped] == [f"{side}.{k}.npy" for side in ("input", "output") for k in range(3)]
    assert set(groups("b.h5")) == {wanted}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_dump": True, "check_overflow": True}, "use_dump and check_overflow exclude each other"),
        ({"use_load": True}, "use_load needs load_file_path"),
        ({"use_load": True, "load_file_path": "gone.h5"}, r"the capture gone.h5.trueup is not beside it.*got:      neither"),
        ({"use_dump": True, "load_with_acl_dump": True}, "give use_load=True and load_file_path"),
        ({"use_load": True, "load_file_path": "a.h5", "load_with_acl_dump": True}, "got:      no "),  # torch.npu, or acl.json
        ({"use_dump": True, "dump_path": "no/where.h5"}, "there is no folder no; make it first"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TrueupError, match=f"(?s){message}"):
        dumper(**arguments)


def test_it_is_not_entered_twice() -> None:
    with dumper(use_dump=True, dump_path="a.h5"), pytest.raises(TrueupError, match="is already running"), dumper(use_dump=True):
        pass
    with dumper(enabled=False, use_dump=True, dump_path="b.h5"):
        torch.ones(2) + 1
    assert not Path("b.h5").exists()
