"""``trueup diff``: two tensors on the command line, as far as they were kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trueup.doors.report.diff import grid

from .written import capture

Trueup = Callable[..., Any]
CALL = "neck/torch.lstm#0"


def tensors(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((8, 40)).astype(np.float32)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, np.ndarray]:
    """A capture, one that differs in two elements, and the second's tensor."""
    a = tensors()
    b = a.copy()
    b[2, 3] += 0.5
    b[7, 39] *= 1.001
    for name, values in (("a", a), ("b", b)):
        capture(tmp_path / name, {"neck/torch.lstm": {"output.0": values, "input.0": a}})
    return tmp_path / "a", tmp_path / "b", b


def test_what_is_printed(trueup: Trueup, pair: tuple[Path, Path, np.ndarray]) -> None:
    a, b, values = pair
    ran = trueup("diff", f"{a}:{CALL}:output.0", f"{b}:0:output.0", "--top", "1")
    lines = ran.out.splitlines()
    before, after = str(tensors()[2, 3]), str(values[2, 3])
    assert (ran.code, ran.err) == (1, "")
    assert lines[:4] == [
        f"baseline   {a}  {CALL}  output.0",
        "           float32 [8, 40], seq 0, forward, step 0, rank 0, api",
        f"candidate  {b}  {CALL}  output.0",
        "           float32 [8, 40], seq 0, forward, step 0, rank 0, api",
    ]
    sentence = " ".join(lines[5:8])
    assert sentence.startswith("Not close: 2 of 320 elements (0.62 %) are outside rtol 1e-5, atol 1e-8; worst at [2, 3] it is")
    assert f"{before} and {after}, 5e-1 apart" in sentence
    assert "max |d|         5e-1 at [2, 3]" in lines
    assert "equal           318 of 320" in lines
    row = next(line for line in lines if line.startswith("[2, 3]"))
    assert row.split()[2:5] == [before, after, "5e-1"]
    assert sum(line.startswith("[") for line in lines) == 1
    assert "units in the last place of float32" in lines
    assert any(line.startswith("values") and line.endswith("candidate") for line in lines)


@pytest.mark.parametrize("width", ["72", "80", "200"])
def test_no_line_is_wider_than_the_terminal(
    trueup: Trueup, pair: tuple[Path, Path, np.ndarray], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.chdir(pair[0].parent)
    lines = trueup("diff", f"a:{CALL}:output.0", "b").out.splitlines()
    assert max(map(len, lines)) <= int(width)


@pytest.mark.parametrize(
    ("options", "code"), [([], 1), (["--rtol", "1e-2"], 1), (["--rtol", "2e-3", "--atol", "0.6"], 0), (["--atol", "0.4"], 1)]
)
def test_tolerances(trueup: Trueup, pair: tuple[Path, Path, np.ndarray], options: list[str], code: int) -> None:
    assert trueup("diff", f"{pair[0]}:{CALL}:output.0", str(pair[1]), *options).code == code


def test_equal_tensors(trueup: Trueup, pair: tuple[Path, Path, np.ndarray]) -> None:
    ran = trueup("diff", f"{pair[0]}:{CALL}:input.0", str(pair[1]))
    assert ran.code == 0
    assert "Equal: all 320 elements are the same on both sides." in ran.out
    assert "units in the last place" not in ran.out
    assert "worst" not in ran.out


def test_close_tensors(trueup: Trueup, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(5))
    np.save(tmp_path / "b.npy", np.array([1, 1, 1 + 1e-9, 1, 1]))
    ran = trueup("diff", tmp_path / "a.npy", tmp_path / "b.npy")
    assert ran.code == 0
    assert "Close: all 5 elements are within rtol 1e-5, atol 1e-8; farthest at [2] it is 1.0 and" in ran.out


def test_a_nan_on_one_side_is_the_worst(trueup: Trueup, tmp_path: Path) -> None:
    a = np.zeros((2, 2), np.float32)
    b = a.copy()
    b[1, 0], b[0, 1] = np.nan, 5.0
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    ran = trueup("diff", tmp_path / "a.npy", tmp_path / "b.npy", "--atol", "100")
    assert ran.code == 1
    assert "worst at [1, 0] it is 0.0 and NaN." in " ".join(ran.out.split())
    assert "NaN             0 on both sides, 0 and 1 on one side only" in ran.out
    assert "relative L2     inf" in ran.out


def test_two_dtypes_and_a_scalar(trueup: Trueup, tmp_path: Path) -> None:
    capture(tmp_path / "a", {"x/op": {"output.0": np.array(3.0, np.float32)}})
    capture(tmp_path / "b", {"x/op": {"output.0": np.array(3.0, ml_dtypes.bfloat16)}})
    ran = trueup("diff", f"{tmp_path / 'a'}:0:output.0", tmp_path / "b")
    assert ran.code == 0
    assert "Equal: the one element is the same on both sides." in ran.out


def test_json(trueup: Trueup, pair: tuple[Path, Path, np.ndarray]) -> None:
    ran = trueup("diff", f"{pair[0]}:{CALL}:output.0", str(pair[1]), "--json", "-", "--top", "2")
    said = json.loads(ran.out, parse_constant=lambda word: pytest.fail(f"no JSON: {word}"))
    assert ran.code == 1
    assert (said["format_version"], said["answer"], said["closeness"]["outside"]) == (1, "apart", 2)
    assert [each["index"] for each in said["closeness"]["worst"]] == [[2, 3], [7, 39]]
    assert said["metrics"]["max_index"] == [2, 3]
    assert said["metrics"]["positions"]["nan"] == {"both": 0, "baseline": 0, "candidate": 0}
    assert sum(row["candidate"] for row in said["values"]) == 320
    assert said["baseline"]["statistics"]["numel"] == 320


@pytest.mark.parametrize("kinds", [("stats", "stats"), ("stats", "tensor"), ("tensor", "stats")])
@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda x: x, 0, "Equal: the digests are the same"),
        (lambda x: x * np.float32(1 + 1e-6), 2, "Could not tell element by element"),
        (lambda x: x[::-1], 1, "Not close: the sketches are"),
        (lambda x: x * 2, 1, "Not close: max is"),
        (lambda x: np.where(x > 2, np.nan, x).astype(np.float32), 1, "Not close: n_nan is 0 and"),
    ],
)
def test_statistics_tell_what_they_can(
    trueup: Trueup, tmp_path: Path, kinds: tuple[str, str], change: Callable[..., Any], code: int, said: str
) -> None:
    a = tensors()
    for name, values, detail in (("a", a, kinds[0]), ("b", np.ascontiguousarray(change(a)), kinds[1])):
        capture(tmp_path / name, {"neck/torch.lstm": {"output.0": values}}, detail)
    ran = trueup("diff", f"{tmp_path / 'a'}:0:output.0", tmp_path / "b")
    assert ran.code == code
    assert said in " ".join(ran.out.split("\n"))
    assert "only statistics were kept" in " ".join(ran.out.split())


def test_a_small_tensor_is_read_from_its_sketch(trueup: Trueup, tmp_path: Path) -> None:
    a = np.linspace(-1, 1, 60, dtype=np.float32).reshape(6, 10)
    b = a.copy()
    b[4, 2] += 1
    for name, values in (("a", a), ("b", b)):
        capture(tmp_path / name, {"neck/torch.lstm": {"output.0": values}}, "stats")
    ran = trueup("diff", f"{tmp_path / 'a'}:0:output.0", tmp_path / "b", "--json", "-")
    said = json.loads(ran.out)
    assert ran.code == 1
    assert (said["closeness"]["outside"], said["closeness"]["worst"][0]["index"]) == (1, [4, 2])
    assert said["closeness"]["worst"][0]["baseline"] == str(float(a[4, 2]))
    assert "were read from its sketch" in said["notes"][0]


def test_digests_alone(trueup: Trueup, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        capture(tmp_path / name, {"neck/torch.lstm": {"output.0": tensors(seed)}}, "digest")
    assert trueup("diff", f"{tmp_path / 'a'}:0:output.0", tmp_path / "c").code == 0
    ran = trueup("diff", f"{tmp_path / 'a'}:0:output.0", tmp_path / "b")
    assert ran.code == 2
    assert "Could not tell" in ran.out
    assert "only a digest was kept" in " ".join(ran.out.split())


def test_shapes_that_differ(trueup: Trueup, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    np.save(tmp_path / "b.npy", np.ones((3, 2)))
    np.save(tmp_path / "c.npy", np.ones((1, 2, 1, 3)))
    ran = trueup("diff", tmp_path / "a.npy", tmp_path / "b.npy")
    assert (ran.code, "Could not tell: the shapes differ, [2, 3] and [3, 2]." in ran.out) == (2, True)
    ran = trueup("diff", tmp_path / "a.npy", tmp_path / "c.npy")
    assert (ran.code, "differ by sizes of one only" in ran.out) == (0, True)


def test_names_with_colons(trueup: Trueup, tmp_path: Path) -> None:
    folder = tmp_path / "run:1"
    capture(folder, {"a/aten::mm": {"output.0": tensors()}})
    assert trueup("diff", f"{folder}:a/aten::mm#0:output.0", f"{folder}:0:output.0").code == 0


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("nowhere:0:output.0", "nowhere:0:output.0 names no tensor."),
        ("a", "a names no tensor."),
        ("a:0", "a:0 names no tensor."),
        ("a:7:output.0", "7 does not mean one call."),
        ("a:0:output.7", "has no slot output.7."),
        ("bad.npy", "bad.npy cannot be read as .npy"),
        ("objects.npy", "objects.npy cannot be read as .npy"),
    ],
)
def test_what_cannot_be_read(trueup: Trueup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, said: str) -> None:
    capture(tmp_path / "a", {"x/op": {"output.0": tensors()}})
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00\x10")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    monkeypatch.chdir(tmp_path)
    ran = trueup("diff", first, "a:0:output.0")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "next:" in ran.err or ";" in ran.err


@pytest.mark.parametrize("option", ["--rtol", "--atol"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_tolerances_that_are_none(trueup: Trueup, option: str, value: str) -> None:
    ran = trueup("diff", "a", "b", option, value)
    assert ran.code == 64
    assert f"{option} cannot be used." in ran.err


def test_two_recorded_trainings(trueup: Trueup, tmp_path: Path) -> None:
    """A weight that was changed is found where it is, in the tensors and in the statistics of real recordings."""
    torch = pytest.importorskip("torch")
    import trueup as library

    for name, change, detail in (("a", 0.0, "tensor"), ("b", 0.25, "tensor"), ("sa", 0.0, "stats"), ("sb", 0.25, "stats")):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).to(torch.bfloat16)
        with torch.no_grad():
            model[0].weight[3, 5] += change
        with library.capture(tmp_path / name, model=model, detail=detail, level="module"):
            model(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()
    weight = f"{tmp_path / 'a'}:0/Linear#0:param.weight"
    ran = trueup("diff", weight, tmp_path / "b", "--phase", "forward", "--json", "-")
    said = json.loads(ran.out)
    assert (ran.code, said["closeness"]["outside"], said["closeness"]["worst"][0]["index"]) == (1, 1, [3, 5])
    assert said["baseline"]["dtype"] == "bfloat16"
    assert trueup("diff", weight, tmp_path / "sb", "--phase", "forward").code == 1
    stats = f"{tmp_path / 'sa'}:0/Linear#0:param.weight"
    ran = trueup("diff", stats, tmp_path / "sb", "--phase", "forward")
    assert (ran.code, "Not close: " in ran.out) == (1, True)
    assert trueup("diff", stats.replace("weight", "bias"), tmp_path / "sb", "--phase", "forward").code == 0
    ran = trueup("show", tmp_path / "a", "--phase", "forward", "--tensor", "0/Linear#0", "output.0", "--npy", tmp_path / "x.npy")
    assert (ran.code, ran.out.splitlines()[-1].endswith("widened from bfloat16, which .npy does not know")) == (0, True)
    output = f"{tmp_path / 'a'}:0/Linear#0:output.0"
    ran = trueup("diff", output, tmp_path / "x.npy", "--phase", "forward", "--rtol", "0", "--atol", "0")
    assert (ran.code, "Equal: all 1,024 elements" in ran.out) == (0, True)


@pytest.mark.parametrize("shape", [[-1], [2**62], [5, 5], [0, 2**47, 2**47], [None]])
def test_a_shape_that_is_none(trueup: Trueup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: list[int | None]) -> None:
    """A damaged record is no traceback and no agreement."""
    from trueup.doors.report import capture_view

    folder = capture(tmp_path / "a", {"x/op": {"output.0": np.arange(24.0).reshape(4, 6)}}, "stats")
    real = capture_view.record_of
    monkeypatch.setattr(capture_view, "record_of", lambda *call: real(*call) | {"shape": shape, "digest": None})
    ran = trueup("diff", f"{folder}:0:output.0", f"{folder}:0:output.0")
    assert (ran.code, ran.err) == (2, "")
    assert "Could not tell" in ran.out


def test_a_page_shows_where_they_are_apart(trueup: Trueup, pair: tuple[Path, Path, np.ndarray], tmp_path: Path) -> None:
    a, b, _ = pair
    ran = trueup("diff", f"{a}:{CALL}:output.0", f"{b}:0:output.0", "--html", str(tmp_path / "page.html"))
    assert ran.code == 1
    assert ran.out.splitlines()[-1] == f"page  {tmp_path / 'page.html'}"
    page = (tmp_path / "page.html").read_text()
    assert 'data-verdict="deviates"' in page
    assert "NOT CLOSE</span> 2 of 320 elements (0.62 %) are outside rtol 1e-5, atol 1e-8; worst at [2, 3] it is" in page
    assert "rows: 8; columns: 40; the largest |d| of each block, up to 5e-1" in page
    assert '<path class="bad-3" d="M3 2h1v1h-1z"/>' in page
    assert '<th scope="row" class="text">[2, 3]</th>' in page
    for title in ("Worst elements", "Measures", "Values", "Units in the last place"):
        assert f">{title} <" in page or f">{title}</h2>" in page, title


def test_a_page_of_equal_tensors_and_of_statistics(trueup: Trueup, pair: tuple[Path, Path, np.ndarray], tmp_path: Path) -> None:
    a, b, _ = pair
    file = tmp_path / "page.html"
    assert trueup("diff", f"{a}:{CALL}:input.0", str(b), "--html", str(file)).code == 0
    assert "EQUAL</span> all 320 elements are the same on both sides." in file.read_text()
    assert 'id="where"' not in file.read_text()
    for name, values in (("c", tensors()), ("d", tensors(1))):
        capture(tmp_path / name, {"neck/torch.lstm": {"output.0": values}}, detail="stats")
    assert trueup("diff", f"{tmp_path / 'c'}:{CALL}:output.0", str(tmp_path / "d"), "--html", str(file)).code == 1
    assert "What was kept" in file.read_text()
    assert 'id="worst"' not in file.read_text()


def test_blocks_hold_the_farthest_element_of_any_dtype() -> None:
    a = np.zeros((2, 40, 100), np.float16)
    b = a.copy()
    b[1, 39, 99], b[0, 0, 0], b[1, 0, 50] = np.inf, 3, np.nan
    found = grid(a, b)
    assert found.shape == (32, 32)
    assert (found[0, 0], found[-1, -1], np.count_nonzero(found)) == (3, np.inf, 3)
    assert grid(b, b).max() == 0
    whole = grid(np.arange(12).reshape(3, 4), np.arange(12).reshape(3, 4)[::-1])
    np.testing.assert_array_equal(whole, [[8] * 4, [0] * 4, [8] * 4])
    wide = np.zeros((3, 5), ml_dtypes.bfloat16)
    assert grid(wide, wide + np.ones(5, ml_dtypes.bfloat16)).tolist() == [[1.0] * 5] * 3
    assert grid(np.ones((2, 2), np.complex64), np.full((2, 2), 1 + 2j, np.complex64)).tolist() == [[2.0, 2.0]] * 2
