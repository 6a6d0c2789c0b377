"""Captures made of real dumps of msprobe, compared with each other and with a native capture: no wrong pass."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trueup
from readers import record_msprobe
from readers.captures import imported
from readers.test_msprobe import leaves
from trueup.doors.cli import main
from trueup.foundation.model import Result

Runs = Callable[[str], Path]
KINDS = ("statistics-mix", "md5-L1", "xor-mix", "tensor-mix")
"""Dumps that exist a second time with a fault: GELU by tanh."""


@pytest.fixture(scope="module")
def runs(dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the capture of a dump; ``-hidden`` is the faulty one that does not own up to the other argument."""
    folder = tmp_path_factory.mktemp("captures")

    def run(kind: str) -> Path:
        if not (folder / kind).exists():
            source = dumps / kind
            if kind.endswith("-hidden"):
                source = folder / f"{kind}-dump"
                shutil.copytree(dumps / kind.removesuffix("-hidden"), source)
                for path in source.rglob("dump.json"):
                    path.write_text(path.read_text().replace('"tanh"', '"none"'))
            imported(source, folder / kind)
        return folder / kind / "capture"

    return run


def recorded(path: Path, steps: int = 0, loss: Callable[..., Any] = record_msprobe.loss_of) -> Path:
    """Capture the run that was dumped: its first backward, or some whole steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    model, ids = record_msprobe.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trueup.capture(path, model=model, level=["module", "api"], steps=f"0:{max(1, steps)}"):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model, ids).backward()
            optimizer.step()
        if not steps:
            loss(model, ids).backward()
    torch.set_num_threads(threads)
    return path


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a native capture of the run that was dumped."""
    return recorded(tmp_path_factory.mktemp("native") / "run")


def altered(dump: Path, copy: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Import a copy of a dump with its calls changed."""
    shutil.copytree(dump, copy / "dump")
    (path,) = (copy / "dump").rglob("dump.json")
    content = json.loads(path.read_text())
    change(content["data"])
    path.write_text(json.dumps(content))
    return imported(copy / "dump", copy)[2].path


def is_gelu(result: Result) -> bool:
    culprit = result.culprit
    return culprit is not None and culprit.op in ("torch.nn.functional.gelu", "GELU") and culprit.phase == "forward"


@pytest.mark.parametrize(("kind", "equal"), [("statistics-mix", 0), ("xor-mix", 0), ("md5-L1", 50), ("tensor-mix", 82)])
def test_a_dump_agrees_with_itself_as_far_as_it_tells(runs: Runs, kind: str, equal: int) -> None:
    result = trueup.compare(runs(kind), runs(kind))
    assert (result.verdict, result.counts["equal"], result.counts["incomparable"]) == ("aligned", equal, 0)
    told = f"{result.counts['compared']} of {result.counts['compared']} calls were compared by statistics alone"
    assert bool(result.notes and result.notes[0].startswith(told)) == (equal == 0)
    if not equal:
        assert "permutation" in result.sentence


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", ["", "-hidden"])
def test_the_fault_is_found(runs: Runs, kind: str, hidden: str) -> None:
    result = trueup.compare(runs(kind), runs(f"{kind}-fault{hidden}"))
    assert (result.verdict, is_gelu(result)) == ("deviates", True), result.sentence
    assert result.culprit is not None
    if kind == "xor-mix":  # that two differ, and not how much
        assert result.culprit.kind == ("operator" if hidden else "argument")
        if hidden:
            assert result.culprit.confidence == "could be rounding"
            assert "inputs agree by their checksums, outputs do not (the size of the error is not known)" in result.sentence
        return
    assert result.culprit.scope in ("layers.0.act", "")
    assert result.culprit.kind == ("operator" if hidden else "argument")
    outputs = {slot.slot: (slot.method, slot.state) for slot in result.culprit.slots}
    assert outputs["output.0"] == ("tensor" if kind == "tensor-mix" else "statistics", "deviates")
    inputs = {"statistics-mix": ("statistics", "agrees"), "md5-L1": ("digest", "equal"), "tensor-mix": ("digest", "equal")}
    assert outputs["input.0"] == inputs[kind]
    assert ("statistics tell" in result.sentence) == (kind == "statistics-mix" and bool(hidden))


def test_statistics_with_tensors_are_compared_by_statistics(runs: Runs) -> None:
    same = trueup.compare(runs("statistics-mix"), runs("tensor-mix"))
    assert (same.verdict, same.counts["equal"], same.counts["deviates"], same.counts["incomparable"]) == ("aligned", 0, 0, 0)
    assert is_gelu(trueup.compare(runs("statistics-mix"), runs("tensor-mix-fault-hidden")))


@pytest.mark.parametrize("kind", ["statistics-mix", "tensor-mix"])
def test_with_a_native_capture(runs: Runs, native: Path, kind: str) -> None:
    same = trueup.compare(native, runs(kind))
    assert (same.verdict, same.counts["equal"] + same.counts["agrees"], same.counts["incomparable"]) == ("aligned", 82, 0)
    if kind == "statistics-mix":
        assert same.counts["equal"] == 0  # statistics tell no more than that they agree
    norms = [dict(run.gradient_norms)[0] for run in (same.baseline, same.candidate)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    modules = trueup.compare(native, runs(kind), level="module")
    assert modules.counts["incomparable"] == modules.counts["deviates"] == 0
    for fault in ("-fault", "-fault-hidden"):
        assert is_gelu(trueup.compare(native, runs(f"{kind}{fault}")))


def test_with_a_native_capture_where_the_scopes_are_unknown(runs: Runs, native: Path) -> None:
    """Level L1: functions are matched by their order. What a linear layer gives its weight is in no such dump, which is said."""
    same = trueup.compare(native, runs("md5-L1"))
    assert (same.verdict, same.counts["compared"], same.counts["agrees"]) == ("aligned", 50, 50)
    assert "the dump lacks gradients of 7 backward calls, mostly of weights" in same.sentence
    assert is_gelu(trueup.compare(native, runs("md5-L1-fault-hidden")))


def test_a_dump_of_steps_with_a_native_capture_of_whole_steps(runs: Runs, dumps: Path, tmp_path: Path) -> None:
    """The dump has no optimizer, nor most gradients of weights: both are told, and a weight that differs after them is seen."""
    whole = recorded(tmp_path / "whole", steps=2)
    same = trueup.compare(whole, runs("statistics-L1"))
    assert (same.verdict, same.counts["unmatched"], same.counts["incomparable"]) == ("aligned", 0, 0), same.sentence
    assert any("the dump has no optimizer" in note for note in same.notes)

    shutil.copytree(dumps / "statistics-L1", tmp_path / "dump")
    (path,) = (tmp_path / "dump").rglob("step1/**/dump.json")
    content = json.loads(path.read_text())
    weight = content["data"]["Functional.linear.1.forward"]["input_args"][1]
    weight.update({number: weight[number] * 1.05 for number in ("Max", "Min", "Mean", "Norm")})
    path.write_text(json.dumps(content))
    other = trueup.compare(whole, imported(tmp_path / "dump", tmp_path)[2].path)
    assert (other.verdict, other.culprits) == ("inconclusive", [])
    assert other.sentence.startswith("COULD NOT TELL  because input.1 of rank 0 step 1 forward api torch.nn.functional.linear#1")


def test_a_loss_module_outside_the_model_is_of_no_scope(runs: Runs, tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.nn.CrossEntropyLoss()(model(ids[:, :-1]).reshape(-1, 16), ids[:, 1:].reshape(-1))
        return found

    result = trueup.compare(recorded(tmp_path / "run", steps=1, loss=loss), runs("statistics-mix"))
    assert (result.verdict, result.counts["unmatched"]) == ("aligned", 0), result.sentence


def test_the_gradient_of_a_linear_weight_is_compared(dumps: Path, native: Path, tmp_path: Path) -> None:
    """The dump has it with the module: as what .grad held."""

    def change(data: dict[str, Any]) -> None:
        (weight,) = data["Module.layers.0.fc.Linear.parameters_grad.0"]["weight"]
        weight.update({number: weight[number] * 1.1 for number in ("Max", "Min", "Mean", "Norm")})

    result = trueup.compare(native, altered(dumps / "statistics-mix", tmp_path, change))
    assert result.culprit is not None
    assert (result.culprit.op, result.culprit.scope) == ("torch.nn.functional.linear", "layers.0.fc")
    assert result.culprit.phase == "backward"
    assert [slot.slot for slot in result.culprit.slots if slot.state == "deviates"] == ["grad_input.1"]


def test_gradients_that_add_up_over_batches_are_no_gradients_of_a_call(dumps: Path, native: Path, tmp_path: Path) -> None:
    """Of every parameter .grad held twice what this backward gave it: nobody is blamed, and nothing is called aligned."""

    def change(data: dict[str, Any]) -> None:
        for name, entry in data.items():
            for weight in (one for members in entry.values() for one in members) if ".parameters_grad." in name else ():
                weight.update({number: weight[number] * 2 for number in ("Max", "Min", "Mean", "Norm")})

    result = trueup.compare(native, altered(dumps / "statistics-mix", tmp_path, change))
    assert (result.verdict, result.culprits) == ("inconclusive", [])


@pytest.mark.parametrize("name", ["Torch.softmax.1.forward", "Functional.linear.4.backward"])
def test_a_call_that_one_dump_lacks_is_never_aligned(dumps: Path, runs: Runs, tmp_path: Path, name: str) -> None:
    result = trueup.compare(runs("md5-L1"), altered(dumps / "md5-L1", tmp_path, lambda data: data.pop(name)))
    assert (result.verdict, result.counts["unmatched"]) == ("inconclusive", 1)
    assert name.split(".")[1] in result.unmatched[0].op


@pytest.mark.parametrize("number", ["Max", "Mean", "Norm"])
def test_one_number_of_one_call_is_enough(dumps: Path, runs: Runs, tmp_path: Path, number: str) -> None:
    """As of a softmax that is wrong by 1 %: what reads the result has the right input again, and is no culprit."""

    def change(data: dict[str, Any]) -> None:
        name = next(n for n in data if n.startswith("Torch.softmax.0.forward"))
        data[name]["output"][0][number] *= 1.01

    result = trueup.compare(runs("statistics-mix"), altered(dumps / "statistics-mix", tmp_path, change))
    assert result.culprit is not None
    assert (result.verdict, result.culprit.op) == ("deviates", "torch.softmax")


@pytest.mark.parametrize("first", ["Functional.embedding.0", "Tensor.__matmul__.0", "Functional.gelu.0"])
@pytest.mark.parametrize("error", [1e-7, 3e-6])
def test_rounding_that_grows_is_not_taken_for_other_data(
    dumps: Path, runs: Runs, tmp_path: Path, first: str, error: float
) -> None:
    """A dump does not say which call made what another reads, so a small difference may come from any call before."""
    chance = random.Random(0)

    def change(data: dict[str, Any]) -> None:
        made: dict[tuple[Any, ...], dict[str, float]] = {}
        begun = False
        for name, entry in data.items():
            begun |= name.startswith(first)
            for part, value in entry.items():
                for tensor in leaves(value) if begun else ():
                    key = tuple(tensor.get(n) for n in ("Max", "Min", "Norm"))
                    if part == "output" and all(isinstance(number, float) for number in key):
                        numbers = {n: tensor[n] for n in ("Max", "Min", "Mean", "Norm")}
                        made.setdefault(key, {n: x * (1 + error * chance.uniform(-1, 1)) for n, x in numbers.items()})
                    tensor.update(made.get(key, {}))

    result = trueup.compare(runs("statistics-mix"), altered(dumps / "statistics-mix", tmp_path, change))
    assert [culprit.kind for culprit in result.culprits if culprit.kind == "input"] == []
    assert error > 1e-7 or result.verdict == "aligned"


def test_nan_in_a_dump_is_a_difference(dumps: Path, runs: Runs, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        name = next(n for n in data if n.startswith("Torch.softmax.0.forward"))
        data[name]["output"][0] |= dict.fromkeys(("Max", "Min", "Mean", "Norm"), float("nan"))

    result = trueup.compare(runs("statistics-mix"), altered(dumps / "statistics-mix", tmp_path, change))
    assert result.culprit is not None
    assert result.culprit.op == "torch.softmax"
    assert "NaN or Inf" in result.sentence


def test_other_inputs_are_not_blamed_on_the_first_operator(dumps: Path, runs: Runs, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data[next(n for n in data if n.startswith("Functional.embedding.0"))]["input_args"][1]["Norm"] *= 1.5
        data[next(n for n in data if n.startswith("Functional.embedding.0"))]["output"][0]["Norm"] *= 1.4

    result = trueup.compare(runs("statistics-mix"), altered(dumps / "statistics-mix", tmp_path, change), level="api")
    assert result.verdict != "aligned"
    assert result.culprit is None or result.culprit.kind == "input"


def test_what_a_dump_lost_keeps_it_from_being_aligned(dumps: Path, runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(dumps / "tensor-mix", tmp_path / "dump")
    next((tmp_path / "dump").rglob("*.pt")).unlink()
    result, _, capture = imported(tmp_path / "dump", tmp_path)
    assert len(result.lost) == len(capture.lost) == 1
    for sides in ((runs("tensor-mix"), capture.path), (capture.path, capture.path)):
        compared = trueup.compare(*sides)
        assert compared.verdict == "inconclusive"
        assert "lost when it was imported" in compared.sentence


@pytest.mark.parametrize("criterion", ["bitwise", "ptdbg", "ptdbg-summary", "paddle"])
def test_criteria_of_measures(runs: Runs, criterion: str) -> None:
    """One that asks for elements could not tell; what it finds to fail is no innocent call."""
    same = trueup.compare(runs("statistics-mix"), runs("statistics-mix"), criterion=criterion)
    assert same.culprits == []
    assert same.verdict == "inconclusive"  # the summary's too: of tensors with an Inf there is no summary
    faulty = trueup.compare(runs("statistics-mix"), runs("statistics-mix-fault"), criterion=criterion)
    assert faulty.culprit is None or is_gelu(faulty)


def test_a_float64_run_is_not_replaced_by_bounds(runs: Runs) -> None:
    result = trueup.compare(runs("tensor-mix"), runs("tensor-mix-fault-hidden"), reference=runs("statistics-mix"))
    assert (result.verdict, is_gelu(result)) == ("deviates", True)


def test_show_says_what_was_kept(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {"statistics-mix": "Only statistics of it were kept", "xor-mix": "Only a checksum of it was kept"}
    for kind, kept in expected.items():
        call = ["--tensor", "layers.0.act/torch.nn.functional.gelu#0", "output.0", "--phase", "forward"]
        assert main(["show", str(runs(kind)), *call]) == 0
        printed = capsys.readouterr().out
        assert kept in printed
        assert "None" not in printed
        assert "import that dump" in printed
    assert "xor64:" in printed
