"""A recipe stops at the first step that explains the difference, and passes nothing that was not compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
from readers import writers
from readers.captures import imported
from recipes.runs import LOSS, Recording, pair, run
from trueup import TrueupError, compare
from trueup.analysis.recipes import RecipeResult, follow
from trueup.analysis.recipes.following import Facts, make
from trueup.analysis.recipes.recipe import Outcome, Readings, load
from trueup.doors.report.triage import conclusion


def made(folder: Path, baseline: Recording, candidate: Recording, recipe: Any = "paddle", **options: Any) -> RecipeResult:
    return follow(*pair(folder, baseline, candidate), recipe, **options)


def statuses(found: RecipeResult) -> list[str]:
    return [outcome.status for outcome in found.outcomes]


def step(found: RecipeResult, name: str) -> Outcome:
    return next(outcome for outcome in found.outcomes if outcome.name == name)


def test_two_healthy_runs_pass(tmp_path: Path) -> None:
    found = made(tmp_path, run(), run())
    assert statuses(found) == ["pass", "pass", "pass", "pass", "pass", "not asked"]
    assert (found.verdict, found.exit_code, found.advice) == ("aligned", 0, None)
    assert step(found, "forward").said == "6 tensors of 6 calls, all bitwise equal"
    assert step(found, "inputs").said == "5 tensors that come into step 0: 5 bitwise equal"
    assert step(found, "several steps").said == "losses of 2 steps: on average 0 % apart, 0 absolute"
    assert step(found, "backward").remarks == ("gradients of weights were not recorded: level api records them",)


def test_a_wrong_forward_is_found_from_the_top_down(tmp_path: Path) -> None:
    found = made(tmp_path, run(), run("body.second"))
    assert statuses(found) == ["pass", "pass", "DEVIATES", "not reached", "not reached", "not reached"]
    forward = step(found, "forward")
    assert forward.scope == "body.second"
    assert [(rung.depth, rung.name, rung.status) for rung in forward.rungs] == [
        (0, "stem", "pass"), (0, "body", "DEVIATES"), (1, "first", "pass"), (1, "second", "DEVIATES"),
    ]  # fmt: skip
    assert forward.said.startswith("body.second, Linear output.0: mean ")
    assert "(20 % apart), tensor " in forward.said
    assert forward.remarks[0].startswith("body.second, forward, step 0, rank 0: inputs are bitwise equal, outputs are not")
    assert (found.verdict, found.exit_code) == ("deviates", 1)


def test_every_step_if_asked_for(tmp_path: Path) -> None:
    found = made(tmp_path, run(), run("stem", losses=(2.0, 2.5)), every=True, metric=(0.9, 0.8))
    assert statuses(found) == ["pass", "pass", "DEVIATES", "pass", "DEVIATES", "DEVIATES"]
    assert step(found, "final metric").said == "0.9 and 0.8, 11 % apart"


@pytest.mark.parametrize(
    ("name", "change"),
    [("order", lambda x: x[::-1].copy()), ("sign of half", lambda x: np.where(np.arange(16) % 2, x, 2 * x.mean() - x))],
)
def test_what_a_mean_hides(name: str, change: Any, tmp_path: Path) -> None:
    found = made(tmp_path, run(), run("stem", change))
    assert step(found, "forward").status == "DEVIATES", name
    assert step(found, "forward").scope == "stem"


def test_a_gradient_of_1e_4_is_within_one_percent_absolute_and_still_wrong(tmp_path: Path) -> None:
    found = made(tmp_path, run(), run("body.first", backward=True))
    assert statuses(found)[:4] == ["pass", "pass", "pass", "DEVIATES"]
    backward = step(found, "backward")
    assert backward.scope == "body.first"
    assert [rung.name for rung in backward.rungs] == ["head", "body", "second", "first"]


def test_a_mean_near_zero_is_no_alarm(tmp_path: Path) -> None:
    """Rounding moves a mean that cancels by any percentage, and of large numbers by more than 0.01."""
    big = run(offset=0.0, losses=(2.0,))
    other = run(offset=0.0, losses=(2.0,))
    for rows, more in ((big.rows, 1.0), (other.rows, 1 + 3e-6)):
        for row in rows:
            if "tensor" in row and row["slot"].startswith("output") and row["scope"] == "head":
                values = row["tensor"].astype(np.float64)
                values = (values - values.mean()) * 1e8
                values[0, 0] *= more
                row["tensor"] = values.astype(np.float32)
    found = made(tmp_path, big, other)
    assert step(found, "forward").status == "pass"


def test_within_the_guides_numbers_but_more_than_rounding_is_said(tmp_path: Path) -> None:
    found = made(tmp_path, run(), run("stem", lambda x: x * 1.002))
    forward = step(found, "forward")
    assert forward.status == "pass"
    assert forward.remarks[0].startswith("within these numbers, but more than rounding: stem, forward, step 0, rank 0: inputs")
    assert (found.result.verdict, found.verdict, found.exit_code) == ("deviates", "deviates", 1)
    assert conclusion(found).startswith("DEVIATES by more than rounding, within the numbers of recipe paddle: DEVIATES  first")


def with_rows(recorded: Recording, change: Callable[[dict[str, Any]], None]) -> Recording:
    for row in recorded.rows:
        change(row)
    return recorded


def spoilt(row: dict[str, Any]) -> None:
    if row["scope"] == "head" and row["slot"] == "output.0":
        row["tensor"] = row["tensor"] * np.float32(np.nan)


def test_nan_on_both_sides_is_no_pass(tmp_path: Path) -> None:
    found = made(tmp_path, with_rows(run(), spoilt), with_rows(run(), spoilt))
    forward = step(found, "forward")
    assert (forward.status, forward.said) == ("could not tell", "1 of 6 tensors hold NaN on both sides, first head output.0")
    assert found.exit_code == 2


def test_losses_that_are_nan_on_both_sides_are_no_pass(tmp_path: Path) -> None:
    losses = (2.0, float("nan"))
    several = step(made(tmp_path, run(losses=losses), run(losses=losses)), "several steps")
    assert (several.status, several.said) == ("could not tell", "the losses of step 1 are NaN on both sides")


def test_metrics_that_are_nan_are_no_pass(tmp_path: Path) -> None:
    nan = float("nan")
    end = step(made(tmp_path, run(), run(), metric=(nan, nan)), "final metric")
    assert (end.status, end.said) == ("could not tell", "both metrics are NaN")


def test_passing_steps_are_no_alignment_where_the_comparison_could_not_tell(tmp_path: Path) -> None:
    """A call of the second step, at which no step of the recipe looks, is in one run only."""
    other = run()
    other.rows = [row for row in other.rows if (row["step"], row["scope"], row["phase"]) != (1, "stem", "backward")]
    found = made(tmp_path, run(), other)
    assert set(statuses(found)) == {"pass", "not asked"}
    assert (found.result.verdict, found.verdict, found.exit_code) == ("inconclusive", "inconclusive", 2)
    assert conclusion(found).startswith("COULD NOT TELL, though each step of recipe paddle passes: COULD NOT TELL  ")


def test_a_backward_that_was_skipped_is_no_pass(tmp_path: Path) -> None:
    other = run()
    other.rows = [row for row in other.rows if row["phase"] != "backward" or row["op"] == LOSS]
    found = made(tmp_path, run(), other)
    assert step(found, "backward").said == "the captures have no backward of step 0 in common"
    assert found.exit_code == 2


def test_weights_that_differ_when_the_captures_begin_are_not_within_rounding(tmp_path: Path) -> None:
    """In a later step a difference of 0.05 % may be what the steps before made of rounding: nobody knows."""

    def later(row: dict[str, Any]) -> None:
        row["step"] += 5

    def heavier(row: dict[str, Any]) -> None:
        if row["slot"] == "param.weight":
            row["tensor"] = row["tensor"] * np.float32(1.0005)

    sides = with_rows(run(), later), with_rows(with_rows(run(), later), heavier)
    inputs = step(made(tmp_path, *sides), "inputs")
    assert inputs.status == "could not tell"
    assert inputs.said.startswith("4 of the tensors that come in differ by up to 0.05 %, more than rounding")


def test_other_data_stop_it(tmp_path: Path) -> None:
    found = made(tmp_path, run(), run(data=0.5))
    assert statuses(found)[:3] == ["pass", "DEVIATES", "not reached"]
    said = "batches differ from step 0 on; first in Model, forward, step 0, rank 0: input.0 differs"
    assert step(found, "inputs").said.startswith(said)


def test_switches(tmp_path: Path) -> None:
    ours = {"OMP_NUM_THREADS": "1", "FLAGS_use_fast_math": "False", "FLAGS_npu_storage_format": "0"}
    found = made(tmp_path / "wrong", run(environment=ours), run(environment=ours | {"FLAGS_npu_storage_format": "1"}))
    assert step(found, "environment").said == (
        "FLAGS_npu_storage_format is 1 in the candidate, and has to be 0 or False (and 1 more)"
    )
    assert found.advice == ("set it the same on both sides, record again, and follow the recipe again", ())
    found = made(tmp_path / "other", run(environment=ours), run(environment=ours | {"FLAGS_use_fast_math": "True"}))
    assert step(found, "environment").said == "FLAGS_use_fast_math differs: False and True"
    found = made(tmp_path / "told", run(environment=ours), run(environment=ours | {"OMP_NUM_THREADS": "8"}))
    environment = step(found, "environment")
    assert (environment.status, environment.remarks) == ("pass", ("may differ: OMP_NUM_THREADS, 1 and 8",))


def test_a_dtype_is_the_same_in_both_frameworks(tmp_path: Path) -> None:
    found = made(tmp_path, run(environment={"default_dtype": "torch.float32"}), run(environment={"default_dtype": "float32"}))
    assert step(found, "environment").status == "pass"


def test_losses_that_part_later(tmp_path: Path) -> None:
    losses = tuple(2.0 - 0.1 * n for n in range(6))
    found = made(tmp_path, run(losses=losses), run(losses=tuple(loss * (1 + 0.02 * n) for n, loss in enumerate(losses))))
    several = step(found, "several steps")
    assert several.status == "DEVIATES"
    assert several.said == "losses of 6 steps: on average 5 % apart, 0.082 absolute; most in step 5, 1.5 and 1.65"


def test_a_loss_beyond_the_model(tmp_path: Path) -> None:
    found = made(tmp_path, run(losses=(2.0, 1.9)), run(losses=(2.2, 1.9)))
    assert step(found, "forward").said == "no module differs, but the losses of step 0 are 10 % apart: 2 and 2.2"


def test_one_step_alone_tells_nothing_of_several(tmp_path: Path) -> None:
    found = made(tmp_path, run(losses=(2.0,)), run(losses=(2.0,)))
    assert step(found, "several steps").said == "only step 0 has a loss on both sides: record several, --steps 0:20"
    assert (found.verdict, found.exit_code) == ("inconclusive", 2)


def test_a_module_on_one_side_only_is_no_pass(tmp_path: Path) -> None:
    """Of such a call the comparison says whether it could do harm; one that could is not passed over."""
    readings = Readings({"forward": load("paddle").steps[2].limits})
    healthy, broken = tmp_path / "healthy", tmp_path / "broken"
    result = compare(*pair(healthy, run(), run()), see=readings.see)
    call = compare(*pair(broken, run(), run("stem"))).culprit
    assert call is not None
    told = dataclasses.replace(result, unmatched=[dataclasses.replace(call, kind="unmatched", side="candidate")])
    outcome = make(load("paddle").steps[2], Facts(told, readings, None))
    assert outcome.status == "could not tell"
    assert outcome.said == "1 call of level module exists in only one run, first stem, forward, step 0, rank 0"


def test_memory_that_a_model_is_made_in_is_no_input(tmp_path: Path) -> None:
    x = torch.ones(3, 4)
    for name in ("base", "again"):
        torch.manual_seed(0)
        with trueup.capture(tmp_path / name, on_error="stop"):  # it begins before the weights are drawn
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    found = follow(tmp_path / "base", tmp_path / "again")
    assert (step(found, "inputs").status, found.verdict) == ("pass", "aligned"), step(found, "inputs").said


def test_eight_ranks_against_one_are_refused(tmp_path: Path) -> None:
    base = run().write(tmp_path / "base", world_size=1)
    cand = run().write(tmp_path / "cand", world_size=8)
    with pytest.raises(TrueupError, match="of different sizes and cannot be aligned") as said:
        follow(base, cand)
    assert "expected: the same number of ranks, for each sees its own share" in str(said.value)
    assert "got:      1 and 8\n  next:     run both with the same number of ranks" in str(said.value)


def test_where_modules_alone_were_recorded_the_next_captures_are_named(tmp_path: Path) -> None:
    base, cand = pair(tmp_path, run(), run("body.first"))
    root = json.loads((cand / "manifest.json").read_text())
    (cand / "manifest.json").write_text(json.dumps(root | {"command": ["python", "train.py", "--name", "a b"]}))
    found = follow(base, cand)
    assert found.advice is not None
    what, (first, second, third) = found.advice
    assert what == "record operators beside the modules on both sides, and follow the recipe again"
    options = "--level module --level api --steps 0:2 --stop"
    assert first == f"trueup capture -o {base}-inside {options} -- COMMAND"
    assert second == f"trueup capture -o {cand}-inside {options} -- python train.py --name 'a b'"
    assert third == f"trueup align {base}-inside {cand}-inside --recipe paddle"
    mapping = tmp_path / "map.toml"
    mapping.write_text('[[scope]]\nbaseline = "stem"\ncandidate = "stem"\n')
    advice = follow(base, cand, mapping=mapping).advice
    assert advice is not None
    assert advice[1][2] == f"{third} --map {mapping}"


def test_with_operators_recorded_the_call_is_named(tmp_path: Path) -> None:
    found = made(tmp_path, run(level="api"), run("body.first", level="api"))
    forward = step(found, "forward")
    assert forward.rungs[-1].name == "linear#0"
    assert forward.scope == "body.first"
    assert found.advice is not None
    assert found.advice[1][0].startswith("trueup show ")


def test_dumps_of_padiff(tmp_path: Path) -> None:
    for name, fault in (("base", 0.0), ("cand", 0.25)):
        imported(writers.padiff(tmp_path / name / "dump", "paddle", fault=fault), tmp_path / name)
    found = follow(tmp_path / "base" / "capture", tmp_path / "cand" / "capture")
    assert step(found, "environment").status == "could not tell"
    deviating = found.deviating
    assert deviating is not None
    assert (deviating.name, deviating.scope) == ("forward", "act")


def test_statistics_alone_are_said_to_be_so(tmp_path: Path) -> None:
    for name, fault in (("base", 0.0), ("same", 0.0), ("cand", 0.25)):
        imported(writers.ptdbg(tmp_path / name / "dump", "6.0", "statistics", fault=fault), tmp_path / name)
    base, same, cand = (tmp_path / name / "capture" for name in ("base", "same", "cand"))
    alike = follow(base, same)
    told = step(alike, "forward")
    assert (told.status, told.said) == ("pass", "3 tensors of 3 calls, the same as far as statistics tell (3 had no more)")
    assert step(alike, "inputs").said.endswith(": 0 bitwise equal, 5 the same as far as statistics tell")
    forward = step(follow(base, cand), "forward")
    assert (forward.status, forward.rungs[-1].name) == ("DEVIATES", "relu#0")
    assert "tensor at least 1.7 % off" in forward.said


def test_an_error_that_does_not_leave_its_module_is_a_remark(tmp_path: Path) -> None:
    other = run(level="api")
    for row in other.rows:
        if row["level"] == "api" and row["scope"] == "stem" and row["slot"] == "output.0":
            row["tensor"] = row["tensor"] * np.float32(1.5)
    forward = step(made(tmp_path, run(level="api"), other), "forward")
    assert forward.status == "pass"
    assert forward.remarks[0].startswith("inside a module that passes: stem, forward, step 0, rank 0: ")


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "strict.toml"
    file.write_text(
        'name = "strict"\n[[step]]\nname = "modules"\ncheck = "forward"\norigin = "ours"\n'
        '[[step.fail]]\nerror = { above = 1e-4 }\norigin = "ours"\n'
    )
    found = made(tmp_path, run(), run("stem", lambda x: x * 1.002), file)
    assert [(o.name, o.status, o.scope) for o in found.outcomes] == [("modules", "DEVIATES", "stem")]
