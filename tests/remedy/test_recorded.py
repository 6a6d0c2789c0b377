"""What a capture says of its policy."""

from __future__ import annotations

from typing import Any

import pytest

from trueup.foundation.store.declared import RuleUse, policy_lines, policy_note, recorded_uses


def use(**given: Any) -> RuleUse:
    return RuleUse(**({"policy": "p.toml", "rule": 1, "calls": "torch.mm", "change": "float32"} | given))


@pytest.mark.parametrize(("given", "said"), [
    ({"matched": 3, "changed": 3}, "p.toml, rule 1 (torch.mm: float32): 3 calls"),
    ({"matched": 3, "changed": 1, "why_not": "so"}, "p.toml, rule 1 (torch.mm: float32): 1 call, 2 left as they were (so)"),
    ({}, "p.toml, rule 1 (torch.mm: float32) changed nothing: no call matched"),
    ({"shadowed": 9}, "p.toml, rule 1 (torch.mm: float32) changed nothing: an earlier rule came first for all 9 calls"),
    ({"matched": 2, "why_not": "so"}, "p.toml, rule 1 (torch.mm: float32) changed nothing: 2 calls matched, but so"),
    ({"matched": 2, "changed": 2, "random": 1},
     "p.toml, rule 1 (torch.mm: float32): 2 calls; 1 drew random numbers so, perhaps others than without it"),
])  # fmt: skip
def test_a_rule_in_words(given: dict[str, Any], said: str) -> None:
    assert str(use(**given)) == said


def test_ranks_are_added_up() -> None:
    first = [use(matched=2, changed=2).to_json(), use(rule=2).to_json()]
    manifests: list[dict[str, Any]] = [{"policy": first}, {"policy": [use(matched=1).to_json()]}, {}]
    assert [(u.rule, u.matched, u.changed) for u in recorded_uses(manifests)] == [(1, 3, 2), (2, 0, 0)]


@pytest.mark.parametrize("said", [
    "x", {"rule": 1}, [7], [{"rule": "1"}], [use().to_json() | {"matched": -1}], [use().to_json() | {"changed": 1e400}], [None],
    [use().to_json() | {"matched": True}], [use().to_json() | {"matched": 1 << 60}],
])  # fmt: skip
def test_a_manifest_that_lies_is_not_believed(said: Any) -> None:
    assert policy_lines([{"policy": said}]) == ()


def test_long_texts_are_cut() -> None:
    (line,) = policy_lines([{"policy": [use(policy="p" * 10**6).to_json()]}])
    assert len(line) < 1000


def test_a_comparison_says_which_side_had_a_policy() -> None:
    one = [use(matched=2, changed=2)]
    assert policy_note([], []) is None
    assert policy_note(one, [use(matched=7, changed=7)]) is None
    assert policy_note([], one) == "only the candidate was given a policy: p.toml (1 rule, 2 calls changed)"
    assert policy_note(one, [use(change="cpu")]) == (
        "the runs were given different policies: the baseline p.toml (1 rule, 2 calls changed), "
        "the candidate p.toml (1 rule, 0 calls changed)"
    )
