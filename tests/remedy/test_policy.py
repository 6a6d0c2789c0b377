"""Policy files: what they may say, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueup.foundation.model import TrueupError
from trueup.foundation.toml import LARGEST
from trueup.recording.engine.policies import GivenValues, Rules
from trueup.recording.policy_file import laid_over, load, parse

GOOD = """
[[rule]]
scope = "encoder.*"
op = "/softmax$/"
dtype = "float32"

[[rule]]
level = "module"
scope = "head"
device = "cpu"
phase = "backward"
"""


def test_rules_are_read_in_order_and_say_what_they_do() -> None:
    policy = parse(GOOD, "p.toml")
    assert [str(rule) for rule in policy.rules] == [
        "rule 1 (/softmax$/ in encoder.*: float32)",
        "rule 2 (module head: cpu, backward only)",
    ]
    first, second = (rule.matcher() for rule in policy.rules)
    assert first("encoder.layer.0", "torch.nn.functional.softmax")
    assert not first("decoder", "torch.nn.functional.softmax")
    assert not first("encoder.layer.0", "torch.nn.functional.softmax_")
    assert second("head", "Linear")
    assert not second("head.0", "Linear")


def test_of_several_rules_for_a_setting_the_first_holds() -> None:
    scaler = '[[rule]]\nlevel = "amp"\nop = "GradScaler"\nset = { init_scale = %s }\n'
    rules = Rules(parse(scaler % 8.0 + scaler % "64.0, growth_factor = 1.0", "p.toml"))
    given = GivenValues(rules.running)
    assert given.to_amp({"init_scale": 2.0, "growth_factor": 2.0}, "GradScaler") == {"init_scale": 8.0, "growth_factor": 1.0}
    assert [use.shadowed for use in rules.uses()] == [0, 1]


def test_new_rules_go_before_those_that_a_run_was_made_under() -> None:
    scaler = '[[rule]]\nlevel = "amp"\nop = "GradScaler"\nset = { init_scale = %s }\n'
    laid = laid_over(scaler % 8.0, "# why\n" + scaler % 64.0 + GOOD)
    assert [str(rule) for rule in parse(laid, "p.toml").rules] == [
        "rule 1 (amp GradScaler: init_scale = 8.0)",
        "rule 2 (/softmax$/ in encoder.*: float32)",
        "rule 3 (module head: cpu, backward only)",
    ]
    more = scaler % "64.0, growth_factor = 1.0"
    assert len(parse(laid_over(scaler % 8.0, more), "p.toml").rules) == 2, "the older rule sets something more"
    spaced = "[[ rule ]]" + (scaler % 64.0).removeprefix("[[rule]]")
    assert len(parse(laid_over(scaler % 8.0, spaced), "p.toml").rules) == 2, "written in another way, nothing is left out"


WRONG = {
    "dtype = 1": "'dtype' is unknown: expected rule",
    "": "rule is missing",
    "rule = []": "no rules, expected one to 1000",
    '[rule]\nop = "a"': "rule: expected tables, each headed [[rule]]",
    "rule = 3": "rule: expected tables, each headed [[rule]]",
    '[[rule]]\nop = "a"': "rule 1: it changes nothing: expected dtype (float32, float64, bfloat16), device",
    '[[rule]]\ndtype = "float32"': "rule 1: it has neither a scope nor an op: a rule for every call would leave nothing of the run",
    '[[rule]]\nop = "a"\ndtyp = "float32"': "rule 1: 'dtyp' is unknown: expected level, scope, op, phase, dtype",
    '[[rule]]\nop = "a"\ndtype = "float16"': "rule 1: dtype 'float16' is unknown: expected bfloat16, float32, float64",
    '[[rule]]\nop = "a"\ndevice = "npu"': "rule 1: device 'npu' is unknown: expected cpu",
    '[[rule]]\nop = "a"\ndevice = ["cpu"]': "rule 1: device: expected a text, got a list",
    '[[rule]]\nop = "a"\ndeterministic = 1': "rule 1: deterministic: expected true or false, got a whole number",
    '[[rule]]\nop = "/(/"\ndevice = "cpu"': "rule 1: pattern /(/ is not a regular expression: missing ), unterminated subpattern",
    '[[rule]]\nop = 7\ndevice = "cpu"': "rule 1: op: expected a text, got a whole number",
    '[[rule]]\nop = ""\ndevice = "cpu"': "rule 1: op: expected a text of length >= 1",
    '[[rule]]\nop = "aten::mm"\ndevice = "cpu"': "rule 1: op 'aten::mm' is an operator of level aten, which no rule reaches",
    '[[rule]]\nop = "a"\nphase = "recompute"\ndevice = "cpu"': "rule 1: phase 'recompute' is unknown: expected backward, forward",
    '[[rule]]\nop = "a"\nlevel = "aten"\ndevice = "cpu"': "rule 1: level 'aten' is unknown: expected amp, api, module, optimizer",
    '[[rule]]\nop = "a"\nreturns = "float16"\ndevice = "cpu"': 'rule 1: returns is for a rule with a dtype',
    '[[rule]]\nop = "A"\nlevel = "module"\nphase = "optimizer"\ndevice = "cpu"': "rule 1: a module has no phase 'optimizer'",
    "[[rule]\nop = 1": "line 1",
    '[[rule]]\nop = "a"\nop = "b"': "Cannot overwrite a value",
    "a = " + "[" * 3000: "too much nesting",
    "".join('[[rule]]\nop = "a"\ndevice = "cpu"\n' for _ in range(1001)): "1001 rules, expected one to 1000",
}


@pytest.mark.parametrize("text", list(WRONG), ids=range(len(WRONG)))
def test_what_is_wrong_is_said(text: str) -> None:
    with pytest.raises(TrueupError) as caught:
        parse(text, "p.toml")
    message = str(caught.value)
    assert message.startswith("The policy cannot be used; nothing was run with it.\n  where:    p.toml")
    assert message.endswith("next:     see docs/policy.md")
    assert WRONG[text] in message.splitlines()[2]


def test_files_that_are_no_policies(tmp_path: Path) -> None:
    binary, large = tmp_path / "binary.toml", tmp_path / "large.toml"
    binary.write_bytes(b"\xff\xfe[[rule]]")
    large.write_bytes(b"#" * (LARGEST + 1))
    none = tmp_path / "none"
    for path, got in ((none, "No such file"), (tmp_path, "a directory"), (binary, "can't decode"), (large, "more than 1 MB")):
        with pytest.raises(TrueupError, match=r"cannot be (used|read)") as caught:
            load(path)
        assert got in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_link_to_something_endless_is_not_read() -> None:
    with pytest.raises(TrueupError, match="something else than a file"):
        load("/dev/zero")
