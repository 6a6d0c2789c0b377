"""Policy files: what they may say, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueup.foundation.model import TrueupError
from trueup.recording.policies import load, parse
from trueup.recording.policies.policy import LARGEST

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


WRONG = {
    "dtype = 1": ("p.toml, dtype", "tables headed [[rule]]", "the key 'dtype'"),
    "": ("p.toml, rule", "one to 1000 rules", "none: it would change nothing"),
    '[rule]\nop = "a"': ("p.toml, rule", "tables headed [[rule]]", "[rule] with single brackets"),
    "rule = 3": ("p.toml, rule", "tables headed [[rule]]", "3"),
    '[[rule]]\nop = "a"': ("p.toml, rule 1", "dtype (float32, float64, bfloat16)", "a rule that changes nothing"),
    '[[rule]]\ndtype = "float32"': ("p.toml, rule 1", "a scope or an op", "neither"),
    '[[rule]]\nop = "a"\ndtyp = "float32"': ("p.toml, rule 1, key 'dtyp'", "one of scope, op", "'dtyp'"),
    '[[rule]]\nop = "a"\ndtype = "float16"': ("p.toml, rule 1, key 'dtype'", "one of float32, float64, bfloat16", "'float16'"),
    '[[rule]]\nop = "a"\ndevice = "npu"': ("p.toml, rule 1, key 'device'", "one of cpu", "'npu'"),
    '[[rule]]\nop = "a"\ndevice = ["cpu"]': ("p.toml, rule 1, key 'device'", "one of cpu", "['cpu']"),
    '[[rule]]\nop = "a"\ndeterministic = 1': ("p.toml, rule 1, key 'deterministic'", "true or false", "1"),
    '[[rule]]\nop = "/(/"\ndevice = "cpu"': ("p.toml, rule 1, key 'op'", "a glob or a regular", "is not a regular expression"),
    '[[rule]]\nop = 7\ndevice = "cpu"': ("p.toml, rule 1, key 'op'", "a glob or a regular", "7"),
    '[[rule]]\nop = "aten::mm"\ndevice = "cpu"': ("p.toml, rule 1, key 'op'", "a function", "an operator of level aten"),
    '[[rule]]\nop = "a"\nphase = "recompute"\ndevice = "cpu"': ("key 'phase'", "leave it out for both", "belongs to forward"),
    '[[rule]]\nop = "a"\nlevel = "aten"\ndevice = "cpu"': ("key 'level'", "one of api, module", "'aten'"),
    '[[rule]]\nop = "a"\nreturns = "float16"\ndevice = "cpu"': ("key 'returns'", "what a function returns", "another rule"),
    '[[rule]]\nop = "A"\nlevel = "module"\nphase = "optimizer"\ndevice = "cpu"': ("key 'phase'", "no optimizer calls one", "'opt"),
    "[[rule]\nop = 1": ("p.toml", "TOML", "line 1"),
    '[[rule]]\nop = "a"\nop = "b"': ("p.toml", "TOML", "Cannot overwrite a value"),
    "a = " + "[" * 3000: ("p.toml", "TOML", ""),
    "".join('[[rule]]\nop = "a"\ndevice = "cpu"\n' for _ in range(1001)): ("p.toml, rule", "one to 1000 rules", "1001"),
}


@pytest.mark.parametrize("text", list(WRONG), ids=range(len(WRONG)))
def test_what_is_wrong_is_said(text: str) -> None:
    with pytest.raises(TrueupError) as caught:
        parse(text, "p.toml")
    message = str(caught.value)
    assert message.startswith("The policy cannot be used; nothing was run with it.\n  where:    p.toml")
    assert message.endswith("next:     see docs/policy.md")
    for part in WRONG[text]:
        assert part in message


def test_files_that_are_no_policies(tmp_path: Path) -> None:
    binary, large = tmp_path / "binary.toml", tmp_path / "large.toml"
    binary.write_bytes(b"\xff\xfe[[rule]]")
    large.write_bytes(b"#" * (LARGEST + 1))
    for path, got in ((tmp_path / "none", "nothing"), (tmp_path, "a directory"), (binary, "no UTF-8"), (large, "right file?")):
        with pytest.raises(TrueupError, match="cannot be used") as caught:
            load(path)
        assert got in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_link_to_something_endless_is_not_read() -> None:
    with pytest.raises(TrueupError, match="something else than a file"):
        load("/dev/zero")
