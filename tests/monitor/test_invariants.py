"""Invariants of a healthy run: they hold in another healthy one, and each planted fault of a public list breaks one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trueup
from trueup.analysis.invariants.conditions import Key, Ranks, Step
from trueup.analysis.invariants.relations import Checked, broken, check, learn, learned, load, save
from trueup.doors.cli import main
from trueup.foundation.model import TrueupError

STEPS = 5


def record(path: Path, seed: int = 0, fault: str = "") -> Path:
    """Train for five steps; faults after those of TrainCheck's artefact (OSDI 2025)."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    if fault == "the optimizer holds copies of the weights":
        optimizer = torch.optim.SGD([torch.nn.Parameter(p.detach().clone()) for p in model.parameters()], 0.1, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if fault == "a layer is frozen by mistake":
        model[0].requires_grad_(False)
    batches = torch.randn(STEPS, 3, 4)
    with trueup.capture(path, model=model, level=("module", "api")) as running:
        for step in range(STEPS):
            if fault == "evaluation mode is left on" and step >= 2:
                model.eval()
            given = batches[0 if fault == "each step gets the same batch" else step]
            loss = torch.nn.functional.mse_loss(model(given), torch.ones(3, 2))
            loss.backward()
            if fault == "the learning rate is 0":
                optimizer.param_groups[0]["lr"] = 0.0
            if not (fault == "the optimizer's step is left out" and step >= 2):
                optimizer.step()
            if fault != "gradients are not cleared":
                optimizer.zero_grad()
            running.step()
    return path


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return learn([record(tmp_path_factory.mktemp("healthy") / "c")])


def test_another_healthy_run_holds(healthy: Any, tmp_path: Path) -> None:
    found = check(healthy, record(tmp_path / "c", seed=7))
    assert (found.verdict, found.violations) == ("aligned", ())
    assert found.sentence == f"HOLDS  {found.judged} relations of the healthy run hold in each step"


SEEN: dict[str, Callable[[Checked], bool]] = {
    "the optimizer holds copies of the weights": lambda found: "in the healthy run torch.Tensor.mul_ (api optimizer)" in
    found.sentence, "a layer is frozen by mistake": lambda found: any(one.scope == "0" for one in found.violations)
    and "changed or not cleared" not in found.sentence,  # other calls of the optimizer renumber those after them
    "evaluation mode is left on": lambda found: found.violations[0].step == 2,
    "each step gets the same batch": lambda found: "each step changes it" in found.sentence,
    "the learning rate is 0": lambda found: any("weight" in one.slot for one in found.violations),
    "the optimizer's step is left out": lambda found: found.violations[0].step <= 3,
    "gradients are not cleared": lambda found: found.sentence.splitlines()[0].endswith("it was changed or not cleared"),
}


@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_breaks_one(healthy: Any, tmp_path: Path, fault: str) -> None:
    found = check(healthy, record(tmp_path / "c", seed=7, fault=fault))
    assert found.exit_code == 1
    assert SEEN[fault](found), found.sentence


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    good = str(record(Path("good")))
    assert main(["invariants", good, "--json", "learned.json"]) == 0
    assert "LEARNED  " in capsys.readouterr().out
    assert json.loads(Path("learned.json").read_text())["count"] == load(Path("invariants.json")).count
    assert main(["invariants", good, "--check", "invariants.json"]) == 0
    assert capsys.readouterr().out.startswith("HOLDS  ")
    bad = str(record(Path("bad"), fault="the learning rate is 0"))
    assert main(["invariants", bad, "--check", "invariants.json", "--json", "found.json"]) == 1
    assert capsys.readouterr().out.startswith("BROKEN  step ")
    assert json.loads(Path("found.json").read_text())["schema"] == "trueup-invariants-check"
    assert main(["invariants", good, bad, "--check", "invariants.json"]) == 64
    Path("other.json").write_text("[]")
    with pytest.raises(TrueupError, match="cannot be read"):
        load(Path("other.json"))


def test_ranks_that_are_equal(tmp_path: Path) -> None:
    from trueup.foundation.store import Writer, claim

    def write(path: Path, parted: bool) -> Path:
        for rank in range(2):
            claim(path, rank, "run")
        for rank in range(2):
            writer = Writer(path, rank, {"run": "run", "levels": ["api"], "detail": "digest"}, {"world_size": 2})
            for step in range(5):
                digest = f"{step + (rank if parted and step == 4 else 0):016x}"
                writer.write_records(step, {
                    "seq": [1], "phase": ["forward"], "level": ["api"], "scope": ["head"], "op": ["linear"], "ordinal": [0],
                    "slot": ["input.weight"], "digest": [digest],
                })  # fmt: skip
            writer.close("complete")
        return path

    known = learn([write(tmp_path / "a", parted=False)])
    assert known.kinds["equal"] == 1
    save(known, tmp_path / "known.json")
    found = check(load(tmp_path / "known.json"), write(tmp_path / "b", parted=True))
    assert found.sentence.splitlines()[0] == (
        "BROKEN  step 4, rank 1: input.weight of head/linear (forward) is not the same on ranks 0 and 1; in the healthy run it is"
    )


def test_ranks_that_part_in_shape_and_a_period_that_did_not_come_again() -> None:
    def run(capacities: dict[int, tuple[int, int]], counts: str) -> Ranks:
        key: Key = ("api", "forward", "moe", "torch.zeros", 0, "output.0")
        total: Key = ("api", "collective", "", "all_reduce", 0, "output.0")
        return {rank: [
            Step(number, rank, {total: counts[number]}, {}, (("api forward", "moe", "torch.zeros"),), {
                key: ("float32", (2, capacities.get(number, (7, 7))[rank], 4)),
            }) for number in range(1, 5)
        ] for rank in range(2)}  # fmt: skip

    known = learned([run({2: (5, 5)}, " abbc"), run({3: (6, 6)}, " xyyz")])
    assert broken(known, run({1: (9, 9)}, " kllm"))[0] == ()
    assert [one.when for one in known.relations if one.query == "bytes"] == []  # two runs had it by chance in one step
    (one,), _ = broken(known, run({4: (8, 9)}, " kllm"))
    said = "output.0 of moe/torch.zeros (forward) has the shape [2, 9, 4], on rank 0 [2, 8, 4]"
    assert (one.relation, one.said) == ("alike", f"step 4, rank 1: {said}; in the healthy run ranks have the same shape")


@pytest.mark.parametrize(("fault", "relation", "words"), [
    ("trained", "stays", "param.weight of {} is not what it was in step 3; in the healthy run no step changes it"),
    ("wide", "types", "output.0 of {} is float32; in the healthy run it is bfloat16"),
    ("short", "shapes", "output.0 of {} has the shape [1, 3], in step 3 [4, 3]; in the healthy run it keeps one"),
    ("other batch", "", ""),
])  # fmt: skip
def test_frozen_weights_dtypes_and_shapes(tmp_path: Path, fault: str, relation: str, words: str) -> None:
    from trueup.foundation.store import Writer, claim

    def write(path: Path, fault: str) -> Path:
        claim(path, 0, "run")
        writer = Writer(path, 0, {"run": "run", "levels": ["module"], "detail": "digest"}, {"world_size": 1})
        for step in range(5):
            late = step == 4
            rows = 1 if fault == "short" and late else 9 if fault == "other batch" else 4
            writer.write_records(step, {
                "seq": [1, 1], "phase": ["forward"] * 2, "level": ["module"] * 2, "scope": ["head"] * 2, "op": ["Linear"] * 2,
                "ordinal": [0, 0], "slot": ["param.weight", "output.0"], "shape": [[3, 3], [rows, 3]],
                "dtype": ["bfloat16", "float32" if fault == "wide" and late else "bfloat16"],
                "digest": [f"{int(fault == 'trained' and late):016x}", f"{step:016x}"],
            })  # fmt: skip
        writer.close("complete")
        return path

    known = learn([write(tmp_path / "a", "")])
    save(known, tmp_path / "known.json")
    found = check(load(tmp_path / "known.json"), write(tmp_path / "b", fault))
    said = f"step 4, rank 0: {words.format('head/Linear (forward)')}"
    assert [(one.relation, one.said) for one in found.violations] == ([(relation, said)] if relation else [])
    assert found.exit_code == int(bool(relation))


def ranks_of(layers: int, parted: str = "", attributes: bool = False, frozen: str = "") -> Ranks:
    """Return four steps of two tensor-parallel ranks: weights of Linear are cut, those of LayerNorm are the same."""
    found: Ranks = {0: [], 1: []}
    for rank, number in itertools.product(found, range(4)):
        digests: dict[Key, str] = {}
        for layer, (op, part) in itertools.product(range(layers), (("Linear", "fc"), ("LayerNorm", "norm"))):
            scope = f"{layer}.{part}"
            own = f"of {rank}" if op == "Linear" or scope == parted else ""
            digests["module", "forward", scope, op, 0, "param.weight"] = f"{scope} {'' if part == frozen else number} {own}"
        cut = {"tensor_model_parallel": "True", "partition_dim": "0"}
        said = {f"{n}.fc.weight": cut for n in range(layers)} if attributes else {}
        said |= {f"{n}.{frozen}.weight": {"requires_grad": "False"} for n in range(layers)} if frozen else {}
        calls = (("module forward", "", "Model"),)
        found[rank].append(Step(number, rank, digests, {}, calls, {}, attributes=said))
    return found


@pytest.mark.parametrize(
    ("attributes", "when"),
    [(False, "for parameters of the class LayerNorm"), (True, "for parameters without tensor_model_parallel")],
)
def test_a_relation_of_a_class_of_parameters_holds_for_layers_that_no_healthy_run_had(
    attributes: bool, when: str, tmp_path: Path
) -> None:
    known = load(save(learned([ranks_of(3, attributes=attributes)]), tmp_path / "known.json"))
    held, judged = broken(known, ranks_of(5, attributes=attributes))
    assert (held, judged) == ((), known.count)
    (one, *_), _ = broken(known, ranks_of(5, parted="4.norm", attributes=attributes))
    assert (one.relation, one.step, one.rank, one.scope) == ("equal", 0, 1, "4.norm")
    said = "step 0, rank 1: param.weight of 4.norm/LayerNorm (forward) is not the same on ranks 0 and 1; in the healthy run it is"
    assert one.said == f"{said}, {when}"
    (one, *more), _ = broken(known, ranks_of(5, parted="1.norm", attributes=attributes))
    assert one.said.endswith("on ranks 0 and 1; in the healthy run it is")  # its own relation says it, once a step
    assert len(more) == 3


def test_what_is_frozen_is_a_class_of_parameters() -> None:
    known = learned([ranks_of(3, frozen="norm")])
    held, _ = broken(known, ranks_of(5, frozen="fc"))
    found = [one for one in held if one.relation in ("changes", "stays")]
    assert found[0].said.startswith("step 1, rank 0: param.weight of 0.fc/Linear (forward) is what it was in step 0; in the")
    assert {one.scope for one in found} == {f"{n}.{part}" for n in range(3) for part in ("fc", "norm")}  # not 3 and 4
    classes = [one for one in known.relations if one.key is not None and one.key[3] == "parameters" and one.query == "bytes"]
    assert sorted(f"{one.name} {one.when}" for one in classes) == [
        "changes for parameters whose requires_grad is True", "stays for parameters whose requires_grad is False",
    ]  # fmt: skip
