from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trueup.analysis.pairing.proposing import Proposal, convert, convert_state, propose, write_map
from trueup.foundation.frameworks.mapping import load
from trueup.foundation.frameworks.trees import Node, Tree

Modules = dict[str, tuple[str, dict[str, tuple[int, ...]]]]


def tree(framework: str, modules: Modules, norms: dict[str, float] | None = None) -> Tree:
    nodes = {
        scope: Node(scope, (kind,), tensors, {}, {name: (norms or {}).get(f"{scope}.{name}", float("nan")) for name in tensors})
        for scope, (kind, tensors) in modules.items()
    }
    return Tree(framework, nodes)


def linear(inside: int, outside: int, *, paddle: bool = False) -> tuple[str, dict[str, tuple[int, ...]]]:
    return "Linear", {"weight": (inside, outside) if paddle else (outside, inside), "bias": (outside,)}


def pairs(found: Proposal) -> dict[str, str]:
    return {pair.baseline: pair.candidate for pair in found.pairs}


TORCH: Modules = {"": ("Net", {}), "body": ("Body", {}), "body.a": linear(3, 4), "body.act": ("ReLU", {}), "head": linear(4, 2)}
PADDLE: Modules = {
    "": ("Model", {}), "trunk": ("Trunk", {}), "trunk.first": linear(3, 4, paddle=True), "trunk.relu": ("ReLU", {}),
    "out": linear(4, 2, paddle=True),
}  # fmt: skip


def test_by_shapes_order_and_structure() -> None:
    found = propose(tree("torch", TORCH), tree("paddle", PADDLE))
    assert pairs(found) == {"": "", "body": "trunk", "body.a": "trunk.first", "body.act": "trunk.relu", "head": "out"}
    assert not found.unsure
    assert {pair.baseline: pair.by for pair in found.pairs}["body.a"] == "order"


def test_equal_names_go_before_order() -> None:
    first: Modules = {"": ("Net", {}), "a": linear(3, 3), "b": linear(3, 3)}
    second: Modules = {"": ("Net", {}), "b": linear(3, 3, paddle=True), "a": linear(3, 3, paddle=True)}
    assert pairs(propose(tree("torch", first), tree("paddle", second))) == {"": "", "a": "a", "b": "b"}


def test_a_layer_that_could_be_several_is_unsure() -> None:
    first: Modules = {"": ("Net", {}), "a": linear(3, 3), "b": linear(3, 3)}
    second: Modules = {"": ("Net", {}), **{name: linear(3, 3, paddle=True) for name in "xyz"}}
    found = propose(tree("torch", first), tree("paddle", second))
    assert len(found.unsure) == 2
    assert "chosen by order among 2 layers of its kind and shape here and 3 there" in str(found)
    assert len(found.only_candidate) == 1


def test_statistics_tell_which() -> None:
    first: Modules = {"": ("Net", {}), "a": linear(3, 3), "b": linear(3, 3)}
    second: Modules = {"": ("Net", {}), "x": linear(3, 3, paddle=True), "y": linear(3, 3, paddle=True)}
    there = tree("torch", first, {"a.weight": 1.0, "a.bias": 0.5, "b.weight": 2.0, "b.bias": 0.7})
    here = tree("paddle", second, {"x.weight": 2.0, "x.bias": 0.7, "y.weight": 1.00001, "y.bias": 0.5})
    found = propose(there, here)
    assert pairs(found) == {"": "", "a": "y", "b": "x"}
    assert {pair.by for pair in found.pairs if pair.kind} == {"statistics"}


def test_other_kinds_and_shapes_are_no_pair() -> None:
    first: Modules = {"": ("Net", {}), "a": linear(3, 3), "n": ("LayerNorm", {"weight": (4,), "bias": (4,)})}
    second: Modules = {"": ("Net", {}), "a": linear(3, 5, paddle=True), "n": ("BatchNorm1D", {"weight": (4,), "bias": (4,)})}
    found = propose(tree("torch", first), tree("paddle", second))
    assert found.only_baseline == ("a", "n")
    assert found.only_candidate == ("a", "n")


def test_a_map_file_comes_back(tmp_path: Path) -> None:
    found = propose(tree("torch", TORCH), tree("paddle", PADDLE))
    told = load(write_map(found, tmp_path / "map.toml"))
    assert told.modules == {pair.candidate: pair.baseline for pair in found.pairs}
    assert told.kinds == {"body.a": "Linear", "head": "Linear"}
    assert told.frameworks == {"baseline": "torch", "candidate": "paddle"}
    assert told.scope("trunk.first") == "body.a"


def test_weights_of_files_by_a_map_alone(tmp_path: Path) -> None:
    attention = {"in_proj_weight": (12, 4), "in_proj_bias": (12,)}
    parts = {f"att.{n}_proj": linear(4, 4, paddle=True) for n in "qkv"}
    torch: Modules = {**TORCH, "att": ("MultiheadAttention", attention), "att.out_proj": linear(4, 4)}
    paddle: Modules = {**PADDLE, "att": ("MultiHeadAttention", {}), **parts, "att.out_proj": linear(4, 4, paddle=True)}
    there, here = tree("torch", torch), tree("paddle", paddle)
    proposal = propose(there, here)
    told = load(write_map(proposal, tmp_path / "map.toml"))
    random = np.random.default_rng(0)
    state = {
        f"{scope}.{name}": random.normal(size=shape or ()).astype(np.float32)
        for scope, node in there.nodes.items() for name, shape in node.tensors.items()
    }  # fmt: skip
    made = convert_state(state, told, "paddle")
    assert made.is_whole, made
    np.testing.assert_array_equal(made.state["trunk.first.weight"], state["body.a.weight"].T)
    np.testing.assert_array_equal(made.state["att.k_proj.weight"], state["att.in_proj_weight"][4:8].T)
    whole = convert(there, here, state, proposal.modules)
    assert made.state.keys() == whole.state.keys()
    for name, array in whole.state.items():
        np.testing.assert_array_equal(made.state[name], array)
    back = convert_state(made.state, told, "torch")
    assert back.is_whole, back
    assert back.state.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(back.state[name], array)


def test_a_map_that_names_no_frameworks(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text("")
    with pytest.raises(Exception, match="no named frameworks"):
        convert_state({}, load(tmp_path / "map.toml"), "paddle")
