"""``python -m ptdbg_ascend.parse``: each command of the prompt, and what it says where it cannot."""

from __future__ import annotations

import csv
import io
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import trueup
from readers.kernel_writers import kernel
from trueup import TrueupError
from trueup_compat.ptdbg_ascend import shell
from trueup_compat.ptdbg_ascend.batch import COLUMNS


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = np.arange(200, dtype=np.float32).reshape(20, 10) + 1
    for folder, factor in (("npu", np.float32(1.01)), ("bench", np.float32(1))):
        Path(folder).mkdir()
        np.save(Path(folder) / "same.npy", values)
        np.save(Path(folder) / "scaled.npy", values * factor)
        np.save(Path(folder) / "other_shape.npy", values if folder == "npu" else values.T)
    np.save("npu/alone.npy", values)
    row = ["Functional_relu_0_forward_input.0", 1, [], "torch.float32", [2], [2.0, 1.0, 1.5]]
    Path("dump.pkl").write_text(str(row).replace("'", '"') + "\n")


def test_two_folders_are_compared_file_by_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.execute("vc -m npu -g bench -out out") == 2  # two shapes cannot be compared
    said = capsys.readouterr().out
    assert said.startswith("4 files: 1 bitwise equal, 1 on one side alone, 1 could not be compared\ntable: out/batch_compare_")
    (table,) = Path("out").iterdir()
    with table.open(newline="", encoding="utf-8") as file:
        rows = {row["NPU File Name"]: row for row in csv.DictReader(file)}
    assert tuple(rows["same.npy"]) == COLUMNS
    assert list(rows["same.npy"].values())[2:] == ["100.5", "100.5", "True", "0.0", "0.0"]
    assert rows["scaled.npy"]["Md5 Consistency"] == "False"
    assert float(rows["scaled.npy"]["Max Abs Error"]) == pytest.approx(2.0, rel=1e-5)
    assert float(rows["scaled.npy"]["Max Relative Error"]) == pytest.approx(0.01, rel=1e-4)
    assert rows["alone.npy"]["Bench File Name"] == ""
    assert rows["other_shape.npy"]["Max Abs Error"] == "N/A"


def test_two_files_and_their_worst_elements(capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.execute("cn -m npu/scaled.npy -g bench/scaled.npy -p 2 -al 0 -rl 0.001 -s") == 1
    said = capsys.readouterr().out
    assert "Not close: 200 of 200 elements" in said
    assert "[19, 9]" in said or "[0, 0]" in said
    assert "wrote parse_data/scaled.npy.txt" in said
    assert shell.execute("cn -m npu/scaled.npy -g bench/scaled.npy -rl 0.02") == 0


def test_a_file_and_the_rows_of_a_dump(capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.execute("pt -n npu/same.npy") == 0
    said = capsys.readouterr().out
    assert said.startswith("shape: [20, 10]  dtype: float32\nmax: 200.0  min: 1.0  mean: 100.5\n            1              2 ")
    assert "and 72 more\nwrote parse_data/same.npy.txt\n" in said
    assert len(Path("parse_data/same.npy.txt").read_text().split()) == 200
    shell.execute("pk -f dump.pkl -n Functional_relu_0")
    assert "[Functional_relu_0_forward_input.0][dtype: torch.float32][shape: [2]][max: 2.0]" in capsys.readouterr().out


def test_dumps_of_kernels_are_read_without_cann(capsys: pytest.CaptureFixture[str]) -> None:
    images = np.arange(2 * 16 * 3 * 3, dtype=np.float16).reshape(2, 1, 3, 3, 16)
    for folder, fault, time in (("d_npu", 1, "1589195081588018"), ("d_bench", 0, "1589195081599999")):
        kernel(Path(folder) / f"Conv2D.conv1.3.7.{time}", (images + np.float16(fault), "NC1HWC0", (2, 9, 3, 3)))
        kernel(Path(folder) / f"Relu.relu.4.7.{time}", (images, "ND", ()))
    assert shell.execute("cad -m d_npu -out npy") == 0
    assert sorted(np.load(path).shape for path in Path("npy").iterdir()) == [(2, 1, 3, 3, 16)] * 2
    assert shell.execute("dc -n d_bench/Conv2D.conv1.3.7.1589195081599999 -f NCHW") == 0
    (made,) = Path("parse_data").iterdir()
    assert made.name == "Conv2D.conv1.3.7.1589195081599999.output.0.2x9x3x3.npy"
    assert np.array_equal(np.load(made), images[:, 0].transpose(0, 3, 1, 2)[:, :9])
    assert shell.execute("vc -m d_npu -g d_bench -out table") == 1
    assert "2 files: 1 bitwise equal" in capsys.readouterr().out


def test_any_other_word_is_a_command_of_the_shell(capfd: pytest.CaptureFixture[str]) -> None:
    assert shell.execute("run echo ran; ls npu | wc -l") == 0
    assert shell.execute("echo so did this") == 0
    assert shell.execute("false") == 2
    said, complained = capfd.readouterr()
    assert said.split("\n")[:3] == ["ran", "4", "so did this"]
    assert complained == "trueup: the shell command ended with 1: false\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vc -m npu -g none", "none is no folder"),
        ("vc -m . -g bench", r"holds what is neither \.npy nor a dump|nothing to convert"),
        ("cn -m npu/same.npy", "Missing option '-g'.*\n  got:      cn -m npu/same.npy\n  next:     cn -h"),
        ("pt -n dump.pkl", "cannot be read as .npy"),
        ("dc -n dump.pkl -f HCNW", "-f is refused.\n  expected: ND, NCHW"),
        ("cad -m dump", "nothing to convert"),
        ("pk -f none -n x", "none cannot be read"),
        ("pt -n 'x", "No closing quotation"),
    ],
)
def test_what_cannot_be_is_said(line: str, message: str) -> None:
    with pytest.raises(TrueupError, match=message):
        shell.execute(line)


def test_lines_that_are_piped_in_run_up_to_exit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("pk -f dump.pkl -n Functional\n\nvc -m npu\nhelp\nexit\npt -n none\n"))
    with pytest.raises(SystemExit) as ended:
        shell.main()
    assert ended.value.code == 2
    said, complained = capsys.readouterr()
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["vc", "cn", "pt", "pk", "cad", "dc", "help", "exit"]
    assert complained == "trueup: Missing option '-g' / '--golden_dump_path'.\n  got:      vc -m npu\n  next:     vc -h\n"


def test_it_is_where_the_tool_had_it(warm: str) -> None:
    root = Path(trueup.__file__).parents[2]
    compat = root / "compat-packages" / "src"
    paths = os.pathsep.join([str(compat / "trueup_compat" / "old_names"), str(compat), str(root / "src")])
    command = [warm, "-m", "ptdbg_ascend.parse"]
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(command, input="pt -n npu/same.npy\n", capture_output=True, text=True, check=False, env=environment)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("shape: [20, 10]")
