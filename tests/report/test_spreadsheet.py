"""Rows of slots from real comparisons of captures, read back with the standard library."""

from __future__ import annotations

import csv
import math
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trueup
from trueup.doors.report import slot_pairs, spreadsheet
from trueup.doors.report.slot_pairs import reduced
from trueup.doors.report.spreadsheet import MEASURES, PLAIN, RED, YELLOW, headings, lines, text_cell, write_csv, write_xlsx
from trueup.foundation.kernels import summarize
from trueup.foundation.model import NUMBERS, PACKED, Result, TrueupError
from verdict.captures import Recording, Slot, compared

RNG = np.random.default_rng(1)
X, W = (RNG.normal(size=(32, 16)).astype(np.float32) for _ in range(2))


def training(*, broken: bool = False, extra: bool = False, parts: str = "stats digest tensor", op: str = "aten::mul") -> Recording:
    run = Recording(parts=parts)
    made = -X
    run.call("aten::neg", [X], [made], scope="a", source="train.py:3 in step")
    product = made * W
    if broken:
        product = product + np.float32(2)
    run.call(op, [made, W], [product], scope="b", arguments={"alpha": 1})
    if extra:
        run.call("aten::zeros", [], [Slot(np.zeros(3, np.float32), "")], scope="b")
    run.call("aten::abs", [product], [np.abs(product)], scope="c", step=1)
    if not extra:
        run.call("aten::ones", [], [Slot(np.ones(3, np.float32), "")], scope="c", step=1)
    return run


def with_detail(directory: str, detail: str) -> None:
    manifest = Path(directory) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"detail": "stats"', f'"detail": "{detail}"'))


def comparison(tmp_path: Path, detail: str, **candidate: Any) -> Result:
    parts = {"tensor": "stats digest tensor", "stats": "stats digest", "digest": "digest"}[detail]
    result = compared(tmp_path, training(parts=parts), training(**({"parts": parts} | candidate)))
    for run in (result.baseline, result.candidate):
        with_detail(run.path, detail)
    return result


def rows(result: Result, tmp_path: Path) -> list[dict[str, str]]:
    path = write_csv(result, tmp_path / "rows.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_real_data(tmp_path: Path) -> None:
    read = rows(comparison(tmp_path, "tensor", broken=True, extra=True), tmp_path)
    assert list(read[0]) == headings("tensor")
    by_name = {row["NPU Name"]: row for row in read}
    good, bad = by_name["b/aten::mul_0_forward_input.0"], by_name["b/aten::mul_0_forward_output.0"]
    assert [float(good[name]) for name in ("Cosine", "MaxAbsErr", "One Thousandth Err Ratio")] == [1, 0, 1]
    assert good["Accuracy Reached or Not"] == "Yes"
    product = (-X * W).astype(np.float64)
    off = (-X * W + np.float32(2)).astype(np.float64)
    cosine = float((product * off).sum() / np.linalg.norm(product) / np.linalg.norm(off))
    assert float(bad["Cosine"]) == pytest.approx(cosine, abs=1e-6)
    assert float(bad["MaxAbsErr"]) == pytest.approx(np.abs(off - product).max())
    assert float(bad["MaxRelativeErr"]) == pytest.approx((np.abs(off - product) / np.abs(product)).max())
    assert float(bad["Five Thousandths Err Ratio"]) == (np.abs(off - product) < 5e-3 * np.abs(product)).mean()
    assert (bad["Accuracy Reached or Not"], bad["Trueup Role"], bad["NPU Tensor Shape"]) == ("No", "culprit", "[32, 16]")
    argument = by_name["b/aten::mul_0_forward_arguments"]
    assert (argument["Cosine"], argument["Accuracy Reached or Not"]) == ("N/A", "N/A")
    assert argument["Err_message"].startswith("This is type of scalar data")
    assert by_name["a/aten::neg_0_forward_input.0"]["NPU_Stack_Info"] == "train.py:3 in step"


def test_calls_of_either_side_have_rows_and_never_pass(tmp_path: Path) -> None:
    read = rows(comparison(tmp_path, "tensor", extra=True), tmp_path)
    alone = [row for row in read if "N/A" in (row["NPU Name"], row["Bench Name"])]
    assert {(row["NPU Name"], row["Bench Name"], row["Err_message"], row["Trueup State"]) for row in alone} == {
        ("b/aten::zeros_0_forward_output.0", "N/A", "No bench data matched.", "only in the candidate"),
        ("N/A", "c/aten::ones_0_forward_output.0", "No NPU data matched.", "only in the baseline"),
    }
    assert {row["Accuracy Reached or Not"] for row in alone} == {"Unmatched"}
    seen = [row["NPU Name"] for row in read]
    assert seen.index("b/aten::zeros_0_forward_output.0") == seen.index("b/aten::mul_0_forward_output.0") + 1


def test_what_was_not_recorded_is_no_number_and_no_pass(tmp_path: Path) -> None:
    result = comparison(tmp_path, "tensor", parts="stats", broken=True)
    with_detail(result.candidate.path, "tensor")
    read = rows(result, tmp_path)
    unlike = ("arguments", "ones")
    measured = [row for row in read if row["Bench Name"] != "N/A" and not any(word in row["NPU Name"] for word in unlike)]
    assert len(measured) == 7
    for row in measured:
        assert {row[name] for name in MEASURES} == {"N/A"}
        assert row["Accuracy Reached or Not"] == "N/A"
        assert row["Err_message"] == "Not recorded on both sides, can not compare."
        assert row["NPU max"] != "N/A"


def test_summary_and_digest_layouts(tmp_path: Path) -> None:
    read = rows(comparison(tmp_path, "stats", broken=True), tmp_path)
    assert list(read[0]) == headings("stats")
    bad = next(row for row in read if row["NPU Name"] == "b/aten::mul_0_forward_output.0")
    assert bad["Result"] == "Warning"
    assert float(bad["Mean diff"]) == pytest.approx(2.0, rel=1e-5)
    assert float(bad["Max diff"]) == pytest.approx(float(bad["NPU max"]) - float(bad["Bench max"]))
    read = rows(comparison(tmp_path, "digest", broken=True), tmp_path)
    assert list(read[0]) == headings("digest")
    told = Counter(row["Result"] for row in read)
    assert set(told) == {"Pass", "Different", "N/A"}
    assert told["Different"] == 3


def test_nothing_begins_a_formula(tmp_path: Path) -> None:
    evil = "=cmd|' /C calc'!A0"
    sides = []
    for _ in range(2):
        run = Recording(parts="stats digest")
        run.call(evil, [X], [np.full(3, -np.inf, np.float32)], scope="", source="@SUM(1)\x1b[2J")
        sides.append(run)
    read = rows(compared(tmp_path, *sides), tmp_path)
    for row in read:
        for value in row.values():
            assert not value.startswith(("=", "@", "+", "\t"))
            assert not value.startswith("-") or math.isfinite(float(value))
            assert "\x1b" not in value
    assert read[0]["NPU Name"] == f"'{evil}_0_forward_input.0"
    assert text_cell("-inf") == "'-inf"


# ---------------------------------------------------------------- Excel
NAMESPACE = {"x": "http://schemas.openxmlformats.org/spreadsheetml/2006/main"}


def workbook(path: Path) -> list[list[tuple[str, str | None]]]:
    """Return, sheet by sheet, the ``(text, colour)`` of each row's first cell; formulas and links are refused."""
    found = []
    with zipfile.ZipFile(path) as book:
        styles = ElementTree.fromstring(book.read("xl/styles.xml"))
        fills = [fill.find(".//x:fgColor", NAMESPACE) for fill in styles.iterfind("x:fills/x:fill", NAMESPACE)]
        colours = [None if fill is None else fill.get("rgb") for fill in fills]
        forms = [colours[int(form.get("fillId", 0))] for form in styles.iterfind("x:cellXfs/x:xf", NAMESPACE)]
        for name in sorted(n for n in book.namelist() if n.startswith("xl/worksheets/sheet")):
            sheet = ElementTree.fromstring(book.read(name))
            assert sheet.find(".//x:f", NAMESPACE) is None
            assert sheet.find(".//x:hyperlink", NAMESPACE) is None
            cells = [row.find("x:c", NAMESPACE) for row in sheet.iterfind(".//x:row", NAMESPACE)]
            found.append([("".join(c.itertext()), forms[int(c.get("s", 0))]) for c in cells if c is not None])
    return found


def coloured(result: Result) -> tuple[list[str], list[int]]:
    _, kept = lines(result)
    made = list(kept)
    names = [name for part in made for name in part.table["NPU Name"].to_pylist()]
    return names, [colour for part in made for colour in part.colour.tolist()]


def test_a_workbook_has_the_rows_and_the_colours(tmp_path: Path) -> None:
    pytest.importorskip("xlsxwriter", reason="xlsxwriter is not installed")
    result = comparison(tmp_path, "tensor", broken=True)
    (sheet,) = workbook(write_xlsx(result, tmp_path / "rows.xlsx"))
    names, kept = coloured(result)
    assert [text for text, _ in sheet[1:]] == names
    colours = dict(sheet[1:])
    assert colours["b/aten::mul_0_forward_output.0"] == "FFFF0000"  # inputs within a thousandth, the output not
    assert colours["a/aten::neg_0_forward_output.0"] is None
    assert set(kept) == {PLAIN, RED}


def test_yellow_is_for_what_gets_worse_inside(tmp_path: Path) -> None:
    sides = []
    for off in (0.0, 30.0):
        run = Recording(parts="stats digest tensor")
        given = X * np.float32(1e6)
        made = given + np.float32(off)
        run.call("aten::add", [given], [made], scope="a")
        sides.append(run)
    result = compared(tmp_path, *sides)
    for run in (result.baseline, result.candidate):
        with_detail(run.path, "tensor")
    assert coloured(result)[1] == [PLAIN, YELLOW]  # MaxAbsErr from 0 to 30: a power of ten


def test_nan_is_red_and_positions_that_differ_are_no_pass(tmp_path: Path) -> None:
    sides = []
    for k in (3, 4):
        run = Recording(parts="stats digest tensor")
        made = X.copy()
        made[0, k] = np.inf
        run.call("aten::mul", [X], [made], scope="a")
        sides.append(run)
    result = compared(tmp_path, *sides)
    for run in (result.baseline, result.candidate):
        with_detail(run.path, "tensor")
    output = rows(result, tmp_path)[1]
    assert output["Err_message"] == "The position of inf or nan in NPU and bench Tensor do not match."
    assert (output["Cosine"], output["Accuracy Reached or Not"]) == ("N/A", "No")


@pytest.mark.parametrize("detail", ["stats", "tensor"])
def test_what_both_runs_overflow_is_infinite_in_the_table(tmp_path: Path, detail: str) -> None:
    """A record leaves out what is not finite; the old tools reduce all of it, and so do their dumps."""
    made = np.array([64352.0, -np.inf, np.inf, 2.0], np.float16)
    below = np.array([-np.inf, 3.0], np.float32)
    run = Recording(parts="stats digest tensor")
    run.call("aten::exp", [X], [made, below, np.array([1.0, np.nan, np.inf], np.float32)], scope="a")
    result = compared(tmp_path, run, run)
    for side in (result.baseline, result.candidate):
        with_detail(side.path, detail)
    found = {row["NPU Name"].rpartition("_")[2]: row for row in rows(result, tmp_path)}
    for side in ("NPU", "Bench"):
        numbers = [[found[f"output.{k}"][f"{side} {name}"] for name in ("max", "min", "mean", "l2norm")] for k in range(3)]
        assert numbers == [["inf", "'-inf", "nan", "inf"], ["3", "'-inf", "'-inf", "inf"], ["nan"] * 4]
    verdict = "Result" if detail == "stats" else "Accuracy Reached or Not"
    assert {row[verdict] for name, row in found.items() if "output" in name} == {"Nan" if detail == "stats" else "Yes"}
    assert list(coloured(result)[1]) == [PLAIN, RED, RED, RED]


def test_an_overflow_of_one_side_is_a_warning(tmp_path: Path) -> None:
    sides = []
    for largest in (2.0, np.inf):
        run = Recording()
        run.call("aten::exp", [X], [np.array([1.0, largest], np.float32)], scope="a")
        sides.append(run)
    result = compared(tmp_path, *sides)
    output = rows(result, tmp_path)[1]
    assert (output["Max diff"], output["NPU max"], output["Bench max"], output["Result"]) == ("inf", "inf", "2", "Warning")


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=6))
def test_reductions_are_those_of_pytorch(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    packed = np.empty(PACKED)
    summarize(tensor.numpy(), packed)
    found = reduced(dict(zip(NUMBERS, packed.tolist(), strict=False)))
    expected = [tensor.max(), tensor.min(), tensor.mean(), tensor.norm()]
    np.testing.assert_allclose(found, [float(x) for x in expected], rtol=1e-12)


def test_a_sheet_that_is_full_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xlsxwriter", reason="xlsxwriter is not installed")
    monkeypatch.setattr(spreadsheet, "SHEET_ROWS", 3)
    sheets = workbook(write_xlsx(comparison(tmp_path, "stats"), tmp_path / "rows.xlsx"))
    assert [len(sheet) for sheet in sheets] == [4, 4, 4]


def test_portions_give_the_rows_of_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = comparison(tmp_path, "stats", broken=True, extra=True)
    whole = rows(result, tmp_path)
    assert len({(row["Step"], row["Rank"]) for row in whole}) == 2
    for read in (1, 5, 1000):
        for made in (1, 4):
            monkeypatch.setattr(slot_pairs, "ROWS", read)
            monkeypatch.setattr(slot_pairs, "MADE", made)
            assert rows(result, tmp_path) == whole


def test_ranks_and_steps_of_either_side_keep_their_order(tmp_path: Path) -> None:
    """Steps are read together; a call of one side alone stays in its own rank and step."""
    sides = []
    for lacking in ((1, 0), (0, 1)):
        run = Recording(parts="stats digest")
        for step in range(3):
            for rank in range(2):
                if (step, rank) != lacking:
                    run.call("aten::neg", [X], [-X], scope="a", step=step, rank=rank)
                if lacking == (1, 0):
                    run.call("aten::abs", [X], [np.abs(X)], scope="b", step=step, rank=rank)
        sides.append(run)
    read = rows(compared(tmp_path, *sides), tmp_path)
    places = [(int(row["Step"]), int(row["Rank"])) for row in read]
    assert places == sorted(places)
    assert Counter(places) == dict.fromkeys(places, 4)
    alone = {(row["Step"], row["Rank"]): row["Trueup State"] for row in read if "neg" in row["NPU Name"] + row["Bench Name"]}
    assert alone[("1", "0")] == "only in the candidate"
    assert alone[("0", "1")] == "only in the baseline"
    assert alone[("2", "1")] == "equal"


def test_every_slot_of_a_training_has_a_row(tmp_path: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for side in ("baseline", "candidate"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        with trueup.capture(tmp_path / side, model=model, detail="tensor"):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(3, 4)).square().sum().backward()
                optimizer.step()
    result = trueup.compare(tmp_path / "baseline", tmp_path / "candidate")
    read = rows(result, tmp_path)
    assert len(read) == trueup.open_capture(tmp_path / "candidate").rows
    assert {row["Accuracy Reached or Not"] for row in read} == {"Yes", "N/A"}
    assert all("arguments" in row["NPU Name"] or row["Err_message"] for row in read if row["Accuracy Reached or Not"] == "N/A")


def test_without_xlsxwriter_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    with pytest.raises(TrueupError, match=r"needs xlsxwriter, which is not installed\.\n  next:     pip install"):
        spreadsheet.xlsxwriter()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    result = comparison(tmp_path, "stats")
    (tmp_path / "file").write_text("")
    with pytest.raises(TrueupError, match=r"rows\.csv could not be written: (File exists|Not a directory)"):
        write_csv(result, tmp_path / "file" / "rows.csv")
