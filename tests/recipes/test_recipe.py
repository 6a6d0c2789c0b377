"""A recipe is a table: PaddlePaddle's comes along, a team's own is read from a file, and what makes no sense is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueup import TrueupError
from trueup.analysis.recipes.recipe import load

OWN = """
name = "ours"
[[step]]
name = "forward"
check = "forward"
origin = "our guide"
[[step.fail]]
error = { above = 0.001 }
origin = "our guide, page 2"
"""


def test_the_guides_order_and_numbers() -> None:
    recipe = load("paddle")
    assert [step.check for step in recipe.steps] == ["environment", "inputs", "forward", "backward", "losses", "metric"]
    _, _, forward, backward, losses, metric = recipe.steps
    assert (forward.loss, backward.loss, losses.limit, metric.limit) == (0.05, 0.05, 0.02, 0.005)
    means = ("mean_absolute_difference", "mean_relative_difference", "mean_scaled_difference")
    for step in (forward, backward):
        conditions = [limit.conditions for limit in step.limits]
        assert conditions == [tuple((name, "above", 0.01) for name in means), (("error", "above", 0.05),)]
        assert all("guide" in limit.origin for limit in step.limits)
    assert all("guide" in step.origin for step in recipe.steps)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(OWN)
    recipe = load(file)
    assert (recipe.name, [step.name for step in recipe.steps]) == ("ours", ["forward"])
    assert recipe.steps[0].numbers == "error above 0.001"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("check = \"forward\"", "check = \"sideways\""), r"step 1: check 'sideways' is unknown: expected backward"),
        (("origin = \"our guide\"\n", ""), r"step 1: origin is missing"),
        (("error = { above = 0.001 }", "errors = { above = 0.001 }"), "fail 1: measure .errors. is unknown: expected cosine"),
        (("name = \"ours\"", "name = \"ours\"\nsteps = 3"), r"'steps' is unknown: expected name, step"),
        (("origin = \"our guide\"\n", "origin = \"our guide\"\nlimit = 3\n"), r"step 1: 'limit' is unknown: expected name"),
        (("[[step.fail]]\nerror = { above = 0.001 }\norigin = \"our guide, page 2\"\n", ""), "it has no .* table"),
        (("[[step]]", "[step]"), r"step: expected tables, each headed \[\[step\]\]"),
        (("[[step]]", "[[step"), r"cannot be read"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(OWN.replace(*change))
    with pytest.raises(TrueupError, match=message):
        load(file)


def test_numbers_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    step = '[[step]]\nname = "end"\ncheck = "metric"\norigin = "x"\n'
    for text, message in (("", "limit is missing"), ("limit = -1\n", "step 1: limit: expected a number > 0.0")):
        file.write_text('name = "ours"\n' + step + text)
        with pytest.raises(TrueupError, match=message):
            load(file)


def test_an_unknown_name() -> None:
    with pytest.raises(TrueupError, match=r"recipe 'padel' is unknown\n  expected: paddle, or the path of a recipe file"):
        load("padel")
