"""The cause of a verdict in its first line: settings, and what the calls show where no setting tells; nothing that is only near."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import settings
import trueup
from nursery import Nursery
from setting_changes.options import CHANGES
from trueup.comparison.result.causes import Seen, place, with_causes
from trueup.comparison.result.shown import _clips, passes_counts, passes_text
from trueup.comparison.result.summary import with_names
from trueup.foundation.facts.why import Why
from trueup.foundation.model import CallKey, Finding, SlotComparison, TensorStats
from trueup.foundation.settings import differing
from trueup.foundation.words.reasons import in_words
from trueup.foundation.words.sentence import Otherwise, verdict_lines
from trueup.foundation.words.setup_sentence import setting_text, settings_text
from verdict.captures import Recording, compared, normal

CELLS = {
    "decay-on-biases": "AdamW weight_decay of 19 parameters (blocks.0.norm1.weight, blocks.0.norm1.bias, blocks.0.norm2.weight…)",
    "clip": "AdamW clipping: not set in the baseline, norm at 0.1 in the candidate",
    "accumulation": "the candidate goes backward 2 times in a step, the baseline once: gradients of micro-batches are added up",
    "frozen": "weight of tokens (Embedding) is trained in the baseline, frozen in the candidate",
    "half": "the candidate computes in bfloat16: 136 of 136 products, float32 in the baseline",
    "init": "initial weights of 1 of 30 parameters differ (head.weight)",
    "other-weights": "initial weights of 11 of 30 parameters differ (tokens.weight, blocks.0.qkv.weight, blocks.0.out.weight…)",
    "label-smoothing": "label_smoothing of torch.nn.functional.cross_entropy: 0.0 in the baseline, 0.1 in the candidate",
    "random-draw": "random numbers are drawn in the candidate only: aten::rand, setting_changes/plain.py:30 in train",
    "matmul-precision": "float32_matmul_precision: highest in the baseline, medium in the candidate; cuda.",
    "zero-grad": "gradients are added to those of the step before in the candidate only: they are not cleared",
}


@pytest.fixture(scope="module")
def work(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for captures; their trainings are forked of the nursery, which has PyTorch already."""
    folder = tmp_path_factory.mktemp("causes")

    def record(script: str, options: settings.Options, into: Path) -> None:
        child = nursery.start("settings.train", folder / "log", script=script, options=dataclasses.asdict(options), into=into)
        assert child.wait() == 0, child.said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "record", record)
        yield folder


@pytest.mark.parametrize("name", CELLS)
def test_a_cause_stands_in_the_first_line_and_no_culprit_beside_it(work: Path, name: str) -> None:
    cell = settings.cell("plain", [name], work)
    line = re.sub("^(DEVIATES|COULD NOT TELL|ALIGNED)  ", "", cell.said.splitlines()[0])
    if name == "matmul-precision":  # some processors round products as they are asked to, others do not
        line = line.removeprefix("set differently: ")
    assert line.startswith(CELLS[name])
    assert (cell.words, cell.further) == (("first line",), 0)


def test_the_run_again_says_nothing_of_settings(work: Path) -> None:
    cell = settings.cell("plain", [], work)
    assert cell.words == ("aligned",)
    assert len(cell.said.splitlines()) == 1


def test_two_causes_are_both_named(work: Path) -> None:
    cell = settings.cell("plain", ["lr", "clip"], work)
    assert set(cell.words) == {"first line", "elsewhere"}  # clipping is a finding, the learning rate another one


def test_what_one_run_alone_does_is_named_behind_a_culprit_that_spoils_all(work: Path) -> None:
    cell = settings.cell("plain", ["clip-by-hand", "dropout"], work)
    assert cell.words == ("elsewhere", "first line")
    said = "note: besides, gradients are clipped in the candidate only: torch.Tensor.square, torch.Tensor.sum, torch.stack…"
    assert said in cell.said
    scaled = settings.cell("plain", ["loss-scale", "dropout"], work)
    assert scaled.words == ("elsewhere", "first line")
    assert "independently: the loss is multiplied by 128 in the candidate only, in torch.Tensor.mul" in scaled.said


def test_the_table_is_whole() -> None:
    assert len(CHANGES) >= 30
    for change in CHANGES.values():
        assert change.candidate.keys() <= {field.name for field in dataclasses.fields(settings.Options)}
        assert set(change.without) <= set(settings.SCRIPTS)


def test_the_word_of_a_cell() -> None:
    class Said:
        verdict, sentence, culprit = "deviates", "DEVIATES  AdamW lr: 0.01 in the baseline, 0.011 in the candidate", None

    assert settings.word(CHANGES["lr"], Said) == "first line"  # type: ignore[arg-type]
    assert settings.word(CHANGES["eps"], Said) == "not named"  # type: ignore[arg-type]
    Said.culprit = Finding("input", 0, 0, "forward", "api", "", "op", 0, None, "", cause="another")  # type: ignore[assignment]
    assert settings.word(CHANGES["eps"], Said) == "wrong cause"  # type: ignore[arg-type]


# ---------------------------------------------------------------- rules by themselves
def finding(kind: Any = "argument", **facts: Any) -> Finding:
    made = Finding(kind, 0, 0, "forward", "api", "", "torch.Tensor.view", 0, None, "")
    return dataclasses.replace(made, **facts)


def slot(before: str, after: str, name: str = "arguments", dtypes: tuple[str, str] = ("", "")) -> SlotComparison:
    return SlotComparison(name, "deviates", float("nan"), "value", dtypes, ("", ""), before, after)


def loader(size: int) -> dict[str, Any]:
    return {"settings": {"data": [{"class": "DataLoader", "batch_size": size, "batch_sampler.batch_size": size}]}}


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [("[4, 8]", "[3, 8]", True), ("[4, 8]", "[3, 9]", False), ("[4, 8]", "[3]", False), ("4", "3", True), ("true", "false", False)],
)
def test_a_size_of_batches_explains_what_was_given_its_two_values(before: str, after: str, named: bool) -> None:
    given = finding(scope="block", slots=(slot(f'{{"1": {before}}}', f'{{"1": {after}}}'),))
    kept, _ = with_causes([given], loader(4), loader(3))
    assert kept[0].cause == ("DataLoader batch_size: 4 in the baseline, 3 in the candidate" if named else "")


def test_what_a_script_was_told_is_the_setting_that_it_became() -> None:
    def side(size: int) -> dict[str, Any]:
        return {"settings": {**loader(size)["settings"], "arguments": {"per_device_batch_size": size, "seed": size}}}

    shape = finding(scope="block", slots=(slot('{"1": 4}', '{"1": 3}'),))
    given = dataclasses.replace(finding(slots=(slot('{"2": 4}', '{"2": 3}'),)), op="aten::rsub", scope="", phase="optimizer")
    kept, _ = with_causes([shape, given], side(4), side(3))
    assert [one.cause for one in kept] == ["DataLoader batch_size: 4 in the baseline, 3 in the candidate"]


def test_another_dtype_explains_roundings_to_it_and_no_more() -> None:
    seen = Seen(dtypes=Why.COMPUTES_IN("bfloat16", 1, 2, "products", "float32"))
    other = slot("", "", "output.0", ("float32", "bfloat16"))
    near, far = (finding("operator", error_out=error, slots=(other,)) for error in (0.01, 0.1))
    kept, _ = with_causes([near, far], {}, {}, seen)
    assert [one.cause for one in kept] == ["the candidate computes in bfloat16: 1 of 2 products, float32 in the baseline", ""]
    same = dataclasses.replace(near, slots=(slot("", "", "output.0", ("float32", "float32")),))
    assert with_causes([same], {}, {}, seen)[0][0].cause == ""


def test_another_dtype_explains_what_is_drawn_and_given_in_it() -> None:
    seen = Seen(dtypes=Why.COMPUTES_IN("bfloat16", 1, 2, "products", "float32"))
    drawn = finding("random", error_out=1.2, slots=(slot("", "", "output.0", ("float32", "bfloat16")),))
    read = slot("", "", "input.0", ("float32", "bfloat16"))
    near, far = (
        finding(error_out=1.2, slots=(read, slot('{"1": 0.1}', f'{{"1": {given}}}'))) for given in (0.10009765625, 0.11)
    )
    kept, _ = with_causes([drawn, near, far], {}, {}, seen)
    assert [(one.cause[:34], one.alike) for one in kept] == [("the candidate computes in bfloat16", 1), ("", 0)]


def test_an_argument_without_a_name_is_no_cause() -> None:
    kept, _ = with_causes([finding(slots=(slot('{"1": 2}', '{"1": 3}'),))], {}, {})
    assert kept[0].cause == ""
    kept, _ = with_causes([finding(slots=(slot('{"dim": 2}', '{"dim": 3}'),))], {}, {})
    assert kept[0].cause == "dim of torch.Tensor.view: 2 in the baseline, 3 in the candidate"
    kept, _ = with_causes([finding(phase="backward", slots=(slot('{"dim": 2}', '{"dim": 3}'),))], {}, {})
    assert kept[0].cause == ""


def test_an_argument_that_an_operator_inside_has_in_its_own_way_is_the_same() -> None:
    outside = finding(op="f", slots=(slot('{"reduction": "mean"}', '{"reduction": "sum"}'),))
    inside = finding(op="aten::f_forward", level="aten", api="f", step=1, slots=(slot('{"reduction": 1}', '{"reduction": 2}'),))
    kept, _ = with_causes([outside, inside], {}, {})
    assert [(one.cause, one.alike) for one in kept] == [
        ('reduction of f: "mean" in the baseline, "sum" in the candidate', 1)
    ]


EMA = "/somewhere/train.py:31 in update"


def test_a_number_in_the_user_s_own_line_is_a_cause() -> None:
    given = finding(op="torch.Tensor.mul_", source=EMA, stack=(EMA,), slots=(slot('{"1": 0.999}', '{"1": 0.99}'),))
    said = "torch.Tensor.mul_ at somewhere/train.py:31: 0.999 in the baseline, 0.99 in the candidate"
    assert with_causes([given], {}, {})[0][0].cause == said
    added = finding(op="torch.Tensor.add_", source=EMA, stack=(EMA,), slots=(slot('{"1": 1e-3}', '{"1": 1e-2}'),))
    (one,), _ = with_causes([given, added], {}, {})  # what stands in one line is one finding, and says both
    assert (one.cause.count("in the candidate"), one.alike) == (2, 1)
    assert one.cause.startswith(said)


@pytest.mark.parametrize(
    "facts",
    [
        {"slots": (slot('{"1": [2, 3]}', '{"1": [3, 2]}'),)},
        {"slots": (slot('{"1": true}', '{"1": false}'),)},
        {"phase": "backward"},
        {"source": "/lib/site-packages/torch/x.py:1 in f", "stack": ("/lib/site-packages/torch/x.py:1 in f", EMA)},
        {"source": None},
    ],
)
def test_a_shape_and_a_library_s_number_are_none(facts: dict[str, Any]) -> None:
    given = finding(source=EMA, stack=(EMA,), slots=(slot('{"1": 2}', '{"1": 3}'),))
    assert with_causes([dataclasses.replace(given, **facts)], {}, {})[0][0].cause == ""


def test_batches_are_no_cause_of_a_number() -> None:
    given = finding(op="torch.Tensor.mul", source=EMA, stack=(EMA,), slots=(slot('{"1": 2.0}', '{"1": 1.5}'),))
    (one,), _ = with_causes([given], {}, {}, Seen(begun=lambda _: "batches differ from step 0 on"))
    assert one.cause.endswith("train.py:31: 2.0 in the baseline, 1.5 in the candidate")


def test_what_a_module_is_given_has_the_name_that_its_forward_gives_it() -> None:
    lacking = dataclasses.replace(slot("", "", "input.1"), candidate=None, baseline="float32 (4, 8)")
    given = finding(level="module", op="Block", scope="blocks.0", slots=(slot('{"2": 1}', '{"2": 3}'), lacking))
    named = with_names(given, {"blocks.0": {"inputs": ["x", "mask", "heads"]}})
    assert [one.slot for one in named.slots] == ["arguments", "input.mask"]
    assert named.slots[0].baseline == '{"heads": 1}'
    assert with_names(given, {"blocks.0": {"inputs": "x"}}) == given
    assert with_names(given, {}) == given


def test_two_optimizers_that_are_set_alike_are_said_once() -> None:
    def held(beta: float) -> dict[str, Any]:
        return {"settings": {"optimizers": [{"class": "Adam", "groups": [{"betas": [beta, 0.999]}], "changes": []}] * 2}}

    left = with_causes([], held(0.5), held(0.9))[1]
    assert len(left) == 2
    assert settings_text(left).count("Adam") == 1


def test_what_is_given_to_a_call_is_named_where_it_is_made_too() -> None:
    weight = dataclasses.replace(slot("", "", "input.2"), baseline=None, candidate="float32 (3)")
    later = finding(op="aten::nll_loss_forward", step=1, slots=(weight,))
    made = dataclasses.replace(later, kind="region", step=0, slots=())
    kept, _ = with_causes([made, later], {}, {})
    said = "weight of aten::nll_loss_forward: absent in the baseline, float32 (3) in the candidate"
    assert [(one.cause, one.alike) for one in kept] == [(said, 1)]


def test_a_norm_that_is_logged_is_no_clipping() -> None:
    assert _clips({"_foreach_norm", "stack", "_foreach_mul"})
    assert _clips({"square", "sum", "sqrt", "rtruediv"})
    assert _clips({"_foreach_clamp_min"})
    assert not _clips({"_foreach_norm", "stack"})
    assert not _clips({"mul", "add"})


def test_no_seed_and_no_loader_changes_an_argument() -> None:
    told = finding(op="torch.Tensor.normal_", rule="random", slots=(slot('{"std": 0.02}', '{"std": 0.5}'),))
    loaders = [{"settings": {"data": [{"class": "DataLoader", "seed": n}]}} for n in (0, 7)]
    sides = [{"seeds": {"torch": n}, **held} for n, held in zip((0, 7), loaders, strict=True)]
    drew = finding("random", op="torch.rand")
    kept, unshown = with_causes([told, drew], *sides)
    assert [one.cause for one in kept] == [
        "std of torch.Tensor.normal_: 0.02 in the baseline, 0.5 in the candidate",
        "seed of torch: 0 in the baseline, 7 in the candidate",
    ]
    assert [one.group for one in unshown] == ["data"]
    read = finding("input", op="aten::copy_", error_in=1.0)
    sides = [{"seeds": {"torch": n}} for n in (0, 7)]
    kept, _ = with_causes([drew, read], *sides, Seen(begun=lambda _: "batches differ from step 0 on"))
    assert [one.cause for one in kept] == ["seed of torch: 0 in the baseline, 7 in the candidate; batches differ from step 0 on"]
    given = [{"settings": {"arguments": {"seed": n}}} for n in (0, 7)]
    (kept, _), _ = with_causes([told, drew], *given)
    assert kept.cause == "std of torch.Tensor.normal_: 0.02 in the baseline, 0.5 in the candidate"


def test_an_order_that_a_script_was_told_gives_other_batches() -> None:
    drew, read = finding("random", op="aten::randperm"), finding("input", op="torch.stack", error_in=1.0)
    given = [{"settings": {"arguments": {"data_seed": n}}} for n in (0, 7)]
    begun = Seen(begun=lambda one: "" if one.kind == "random" else "batches differ from step 0 on")
    kept, _ = with_causes([drew, read], *given, begun)
    assert [one.cause for one in kept] == ["data_seed: 0 in the baseline, 7 in the candidate; batches differ from step 0 on"]
    kept, _ = with_causes([read], *given, begun)  # nothing was drawn by it
    assert [one.cause for one in kept] == ["batches differ from step 0 on"]


def test_numbers_drawn_in_one_run_alone_give_other_batches_where_they_choose_samples() -> None:
    alone = Why.DRAWN_ALONE(CallKey(0, 0, "forward", "aten", "", "aten::rand", 0), "candidate", "train.py:9 in train")
    drew, read = finding("random", op="aten::randint"), finding("input", op="torch.stack", error_in=1.0, seq=(3, 4))
    begun = Seen({place(drew): alone}, lambda one: "" if one.kind == "random" else "batches differ from step 0 on")
    (one,), _ = with_causes([drew, read], {}, {}, begun)
    assert (one.cause, one.alike) == (f"{in_words(alone)}; batches differ from step 0 on", 1)
    inside = dataclasses.replace(drew, scope="net.drop")  # an order was drawn as in the baseline: the batches are another cause
    assert len(with_causes([inside, read], {}, {}, begun)[0]) == 2


def test_the_backward_of_a_function_follows_from_its_argument() -> None:
    told = finding(op="cross_entropy", source="train.py:9", slots=(slot('{"label_smoothing": 0.0}', '{"label_smoothing": 0.1}'),))
    back = finding("operator", op="cross_entropy", source="train.py:9", phase="backward", step=1)
    (one,), _ = with_causes([told, back], {}, {})
    assert one.alike == 1
    inside = dataclasses.replace(back, level="aten", op="aten::_log_softmax_backward_data", api="cross_entropy")
    assert len(with_causes([told, inside], {}, {})[0]) == 1
    for other in ({"op": "linear"}, {"source": "train.py:8"}, {"phase": "forward"}, {"source": None}):
        assert len(with_causes([told, dataclasses.replace(back, **other)], {}, {})[0]) == 2


def test_a_length_explains_its_own_two_values_anywhere() -> None:
    sides = [{"settings": {"modules": {"places": {"class": "Embedding", "num_embeddings": n}}}} for n in (32, 24)]
    mask = finding(op="torch.ones", slots=(slot('{"0": 32, "1": 32}', '{"0": 24, "1": 24}'),))
    read = SlotComparison("input.0", "incomparable", 0.0, "tensor", ("int64",) * 2, ("(8, 32)", "(8, 24)"), None, None)
    shaped, other = finding(slots=(read,)), finding(op="f", slots=(slot('{"0": 32}', '{"0": 25}'),))
    kept, _ = with_causes([mask, shaped, other], *sides)
    said = "num_embeddings of places (Embedding): 32 in the baseline, 24 in the candidate"
    assert [(one.cause, one.alike) for one in kept] == [(said, 1), ("", 0)]


def test_an_attribute_of_a_user_s_module_explains_what_was_given_its_values() -> None:
    sides = [{"settings": {"modules": {"attn": {"class": "Attention", "n_head": n, "width": 16 // n}}}} for n in (4, 8)]
    made = SlotComparison("output.0", "incomparable", 0.0, "tensor", ("", ""), ("(4, 4)", "(8, 2)"), None, None)
    view = finding(scope="attn", slots=(slot('{"2": 4}', '{"2": 8}'), made))
    kept, left = with_causes([view], *sides)
    assert kept[0].cause == "n_head of attn (Attention): 4 in the baseline, 8 in the candidate"
    assert left == []  # what its others do nobody knows
    drew = finding("random", scope="attn.drop", seq=(5, 5))  # after what another shape took from the generator
    assert len(with_causes([view, drew], *sides)[0]) == 1
    assert len(with_causes([view, dataclasses.replace(drew, step=1)], *sides)[0]) == 2
    kept, _ = with_causes([dataclasses.replace(view, scope="other")], *sides)
    assert "n_head" not in kept[0].cause


def test_no_mode_decides_which_tensors_a_call_is_given() -> None:
    sides = [{"settings": {"modules": {"a": {"class": "Block", "training": on}}}} for on in (True, False)]
    shape = dataclasses.replace(slot("", "", "input.attn_mask"), baseline="bool (4, 8)", candidate=None)
    told = slot('{"dropout_p": 0.1}', '{"dropout_p": 0.0}')
    (lacking, given), _ = with_causes([finding(scope="a", slots=(one,)) for one in (shape, told)], *sides)
    assert lacking.cause == "attn_mask of torch.Tensor.view: bool (4, 8) in the baseline, absent in the candidate"
    assert given.cause == "training of a (Block): True in the baseline, False in the candidate"


def test_a_module_around_one_that_lacks_a_tensor_follows_in_later_steps() -> None:
    mask = dataclasses.replace(slot("", "", "input.mask"), baseline="bool (4, 8)", candidate=None)
    lacking = finding(level="module", op="Attention", scope="net.attention", slots=(mask,))
    later = finding("operator", level="module", op="Net", scope="net", step=1)
    assert [one.alike for one in with_causes([lacking, later], {}, {})[0]] == [1]
    for other in ({"step": 0}, {"scope": "net2"}, {"scope": "net.attention"}, {"level": "api"}, {"rank": 1}):
        assert len(with_causes([lacking, dataclasses.replace(later, **other)], {}, {})[0]) == 2


@pytest.mark.parametrize(
    ("before", "after", "follows"),
    [("0.25", "0.5", True), ("0.5", "0.7071067811865475", True), ("2.0", "1.4142135623730951", True), ("0.5", "0.7071", False),
     ("0.25", "0.7071067811865475", False), ('"a"', '"b"', False)],
)  # fmt: skip
def test_a_number_that_is_computed_of_lengths_follows_from_their_setting(before: str, after: str, follows: bool) -> None:
    view = finding(scope="a", slots=(slot('{"1": 4}', '{"1": 2}'),))
    scale = finding(scope="a", op="torch.Tensor.mul", slots=(slot(f'{{"1": {before}}}', f'{{"1": {after}}}'),))
    kept, _ = with_causes([view, scale], loader(4), loader(2))
    assert kept[0].cause == "DataLoader batch_size: 4 in the baseline, 2 in the candidate"
    assert len(kept) == (1 if follows else 2)


def test_gradients_that_are_not_cleared_beside_another_optimizer(tmp_path: Path) -> None:
    def run(op: str, *, cleared: bool) -> Recording:
        made, weight, total = Recording(), normal(8, 8, seed=9), normal(8, 8) * 0
        for step in (0, 1):
            x = normal(8, 8, seed=step)
            made.call("aten::mm", [x, weight], [x @ weight], step=step)
            made.call("aten::mm", [x, x], [gradient := x @ x], step=step, phase="backward")
            total = gradient if cleared or step == 0 else total + gradient
            made.call(op, {"input.0": weight, "input.1": total}, [weight := weight - total], step=step, phase="optimizer")
        return made

    result = compared(tmp_path, run("adamw_", cleared=True), run("adam_", cleared=False))
    said = "from step 1 on, the optimizer reads gradients that no recorded backward call made: they are not cleared"
    assert said in result.sentence
    assert "what the optimizer made of mm(1);" in result.sentence
    assert "no recorded backward" not in compared(tmp_path, run("adamw_", cleared=True), run("adam_", cleared=True)).sentence
    assert "no recorded backward" not in compared(tmp_path, run("adamw_", cleared=False), run("adam_", cleared=False)).sentence


def test_a_batch_s_size_decides_neither() -> None:
    sides = [{"settings": {"data": [{"class": "DataLoader", "batch_size": n}]}} for n in (4, 3)]
    mask = dataclasses.replace(slot("", "", "input.mask"), baseline="bool (4, 8)", candidate=None)
    shape = SlotComparison("input.0", "incomparable", 0.0, "tensor", ("float32",) * 2, ("(4, 8)", "(3, 8)"), None, None)
    (lacking, other), _ = with_causes([finding(slots=(mask, shape)), finding(slots=(shape,))], *sides)
    assert lacking.cause == "mask of torch.Tensor.view: bool (4, 8) in the baseline, absent in the candidate"
    assert other.cause == "DataLoader batch_size: 4 in the baseline, 3 in the candidate"


def test_what_is_read_before_a_loader_draws_has_no_order_yet() -> None:
    sides = [{"settings": {"data": [{"class": "DataLoader", "seed": n}]}} for n in (0, 7)]
    begun = Seen(begun=lambda _: "batches differ from step 0 on")
    before, after = (finding("input", seq=(n, n)) for n in (1, 9))
    drew = finding("random", op="aten::randperm", seq=(5, 5))
    kept, _ = with_causes([before, drew, after], *sides, begun)
    order = "batches in another order from step 0: DataLoader seed: 0 in the baseline, 7 in the candidate"
    assert [(one.cause, one.alike) for one in kept] == [("batches differ from step 0 on", 0), (order, 1)]


def test_the_number_of_batches_follows_from_what_makes_them() -> None:
    data = [{"class": "DataLoader", "batch_size": 4, "samples": 14, "drop_last": drops} for drops in (False, True)]
    sides = [{"settings": {"data": [one]}} for one in data]

    def read(*numbers: int) -> Finding:
        stats = [TensorStats(1, n, n, n, n, 0, 0, 0, 0, 0, 0) for n in numbers]
        return finding("input", slots=(SlotComparison("input.0", "deviates", 0.1, "tensor", ("int64",) * 2, ("()",) * 2, *stats),))

    (number, other), _ = with_causes([read(4, 3), read(4, 2)], *sides)
    assert number.cause == "DataLoader drop_last: False in the baseline, True in the candidate"
    assert other.cause == ""


def test_micro_batches_that_a_script_asked_for_are_its_passes() -> None:
    sides = [{"settings": {"arguments": {"accumulate": n}}} for n in (1, 2)]
    passes = "the candidate goes backward 2 times in a step, the baseline once: gradients of micro-batches are added up"
    scaled = finding("argument", op="aten::div", phase="backward", step=3, slots=(slot('{"1": 1}', '{"1": 2}'),))
    kept, _ = with_causes([finding("region"), scaled], *sides, Seen(passes=passes, counts=(1, 2)))
    assert [(one.cause.startswith(passes), one.alike) for one in kept] == [(True, 1)]


def test_what_a_script_was_told_explains_a_loss_that_is_scaled_by_it() -> None:
    sides = [{"settings": {"arguments": {"smoothing": n, "steps": 7}}} for n in (0.0, 0.1)]
    made = finding("region", op="aten::add")
    (one,), _ = with_causes([made], *sides, Seen(factors=frozenset((0.1, 0.9))))
    assert one.cause == "smoothing: 0.0 in the baseline, 0.1 in the candidate"
    (one,), _ = with_causes([dataclasses.replace(made, scope="layers")], *sides, Seen(factors=frozenset((0.1, 0.9))))
    assert one.cause == ""


def test_what_one_run_alone_executes_is_one_finding_with_its_backward() -> None:
    runs = Why.RUNS_ALONE("candidate", ("torch.Tensor.mul", "torch.nn.functional.log_softmax"))
    forward, backward = finding("region", seq=(1, 1)), finding("region", phase="backward", seq=(2, 2))
    kept, _ = with_causes([forward, backward], {}, {}, Seen({place(one): runs for one in (forward, backward)}))
    assert [(one.phase, one.alike) for one in kept] == [("forward", 1)]


def test_an_operator_alone_has_the_argument_as_the_function_calls_it() -> None:
    given = slot('{"reduction": 1}', '{"reduction": 2}')
    forward = finding(op="aten::f_forward", level="aten", api="f", source="a.py:3", slots=(given,))
    backward = dataclasses.replace(forward, op="aten::f_backward", phase="backward")
    kept, _ = with_causes([forward, backward], {}, {})
    assert [(one.cause, one.alike) for one in kept] == [('reduction of f: "mean" in the baseline, "sum" in the candidate', 1)]
    assert len(with_causes([forward, dataclasses.replace(backward, source="a.py:4")], {}, {})[0]) == 2


def test_a_loss_s_own_setting_says_which_multiple_it_is() -> None:
    sides = [{"settings": {"modules": {"loss": {"class": "CrossEntropy", "reduction": how}}}} for how in ("mean", "sum")]
    made = (TensorStats(1, n, n, n, n, 0, 0, 0, 0, 0, 0) for n in (2.0, 8.0))
    scaled = SlotComparison("output.0", "deviates", 3.0, "statistics", ("float32",) * 2, ("()",) * 2, *made)
    (one,), _ = with_causes([finding("region", op="div", slots=(scaled,))], *sides)
    assert one.cause == "reduction of loss (CrossEntropy): mean in the baseline, sum in the candidate"
    (one,), _ = with_causes([finding("region", op="div", slots=(scaled,))], {}, {})
    assert one.cause.startswith("the loss is 4 times the baseline's")
    (one,), _ = with_causes([finding("region", op="div", slots=(scaled,))], {}, {}, Seen(grown={0: 3.5}))
    assert one.cause == "", "a number of which a loss is made"


def test_a_sum_in_place_of_a_mean_is_another_reduction() -> None:
    said = in_words(Why.REDUCED("paddle._C_ops.mean_all", "paddle._C_ops.sum"))
    assert said == "the loss has another reduction: paddle._C_ops.mean_all in the baseline, paddle._C_ops.sum in the candidate"
    (one,), _ = with_causes([finding("region", op="paddle._C_ops.sum")], {}, {}, Seen(reduced=said))
    assert one.cause == said


def test_what_is_drawn_after_batches_of_another_size_follows_from_them() -> None:
    later = finding("random", scope="block.drop", op="torch.nn.functional.dropout", step=3)
    kept, _ = with_causes([later, dataclasses.replace(later, step=0)], loader(4), loader(3))
    assert [one.cause for one in kept] == ["DataLoader batch_size: 4 in the baseline, 3 in the candidate", ""]


def test_the_last_batch_is_dropped() -> None:
    def side(drops: bool, lr: float) -> dict[str, Any]:
        optimizer = {"class": "SGD", "groups": [{"lr": 1.0}], "changes": [[1, 0, {"lr": lr}]]}
        return {"settings": {"optimizers": [optimizer], "data": [{"class": "DataLoader", "drop_last": drops}]}}

    begun = finding("operator", rule="random")
    given = finding(phase="optimizer", step=1, slots=(slot('{"1": 0.5}', '{"1": 0.25}'),))
    kept, _ = with_causes([begun, given], side(drops=False, lr=0.5), side(drops=True, lr=0.25))
    loader = "DataLoader drop_last: False in the baseline, True in the candidate"
    assert [one.cause for one in kept] == ["", f"SGD lr: 0.5 in the baseline, 0.25 in the candidate (from step 1); {loader}"]


def test_one_setting_that_shows_nowhere_stands_in_the_first_line() -> None:
    lines = verdict_lines("deviates", [finding()], [], [], [], {}, otherwise=Otherwise("smoothing: 0 in the baseline", single=True))
    assert lines[0].endswith("(torch.Tensor.view); set differently: smoothing: 0 in the baseline")
    lines = verdict_lines("deviates", [finding(cause="lr")], [], [], [], {}, otherwise=Otherwise("smoothing: 0", single=True))
    assert (lines[0], lines[-1].strip()) == ("DEVIATES  lr", "note: also set differently: smoothing: 0")


def test_what_an_optimizer_made_of_several_parameters_is_in_no_module() -> None:
    written = slot("", "", "output.a.w"), dataclasses.replace(slot("", "", "output.b.w"), state="equal")
    update = finding("operator", scope="a", op="optimizer.step", phase="optimizer", cause="lr", slots=written)
    more = dataclasses.replace(update, slots=(*update.slots, slot("", "", "output.c.w:state 1")))
    said = [verdict_lines("deviates", [one], [], [], [], {})[1].strip() for one in (update, more)]
    assert said[0] == "first seen in: a, optimizer, step 0, rank 0  (optimizer.step)"
    assert said[1] == "first seen in: 2 of 3 parameters, optimizer, step 0, rank 0  (optimizer.step)"


def test_a_schedule_is_not_compared_beyond_the_last_common_step() -> None:
    def side(*changes: list[Any]) -> dict[str, Any]:
        return {"settings": {"optimizers": [{"class": "SGD", "groups": [{"lr": 1.0}], "changes": list(changes)}]}}

    sides = side([1, 0, {"lr": 0.5}], [2, 0, {"lr": 0.25}]), side([1, 0, {"lr": 0.5}])
    assert [one.step for one in differing(*sides)] == [2]
    assert differing(*sides, last=1) == []


def test_passes_of_steps_that_both_have() -> None:
    assert passes_text(passes_counts(({0: 1, 1: 4}, {0: 1}))) == ""
    said = "the baseline goes backward 4 times in a step, the candidate 2 times: gradients of micro-batches are added up"
    assert passes_text(passes_counts(({0: 4}, {0: 2}))) == said


def test_settings_of_modules_of_several_classes_are_one() -> None:
    def side(training: bool) -> dict[str, Any]:
        held = {"a": {"class": "Block", "training": training}, "a.drop": {"class": "Dropout", "training": training}}
        return {"settings": {"modules": held}}

    found = differing(side(True), side(False))
    assert [(one.kind, one.name, one.places) for one in found] == [("module", "training", ("a", "a.drop"))]


def test_an_optimizer_holds_fewer_parameters_because_one_is_frozen() -> None:
    module = {"class": "Linear", "weight.dtype": "float32"}

    def side(count: int, **more: Any) -> dict[str, Any]:
        group = {"lr": 1.0, "parameters": count}
        return {"settings": {"modules": {"a": module | more}, "optimizers": [{"class": "SGD", "groups": [group]}]}}

    assert [one.name for one in differing(side(2), side(1))] == ["parameters"]
    assert [one.name for one in differing(side(2), side(1, **{"weight.requires_grad": False}))] == ["weight.requires_grad"]


def test_the_precision_of_products_explains_a_product_that_is_off_by_bfloat16() -> None:
    sides = [{"settings": {}, "environment": {"float32_matmul_precision": said}} for said in ("highest", "medium")]
    said = "float32_matmul_precision: highest in the baseline, medium in the candidate"
    for op, error, cause in (("aten::addmm", 2e-3, said), ("aten::addmm", 0.5, ""), ("aten::tanh", 2e-3, "")):
        (kept,), _ = with_causes([finding(kind="operator", op=op, level="aten", error_out=error)], *sides)
        assert kept.cause == cause


def test_a_weight_that_is_tied_in_one_run_explains_what_both_of_its_modules_do() -> None:
    def side(**tie: str) -> dict[str, Any]:
        linear = {"class": "Linear", "weight.dtype": "float32"}
        return {"settings": {"modules": {"a": linear, "b": linear, "c": linear | tie}}}

    sides = side(**{"weight.tied_to": "a.weight"}), side()
    for scope, cause in (("a", "weight of c (Linear) is tied to a.weight in the baseline, its own in the candidate"), ("b", "")):
        (kept,), _ = with_causes([finding(kind="region", op="aten::add", level="aten", phase="backward", scope=scope)], *sides)
        assert kept.cause == cause
    said = "initial weights of 1 of 3 parameters differ (c.weight)"
    drawn = finding(kind="argument", op="torch.Tensor.to", level="api")
    read = finding(kind="argument", op="aten::t", level="aten", scope="c", seq=(9, 9))
    seen = Seen(begun=lambda one: said if one.op == drawn.op else "", weights=said, unlike=frozenset({"c.weight"}))
    (kept,), _ = with_causes([drawn, read], *sides, seen)
    assert (kept.cause, kept.alike) == ("weight of c (Linear) is tied to a.weight in the baseline, its own in the candidate", 1)


def test_attributes_that_only_one_class_has_follow_from_the_class() -> None:
    def side(**module: Any) -> dict[str, Any]:
        return {"settings": {"modules": {"norm": module}}}

    function, hand = {"class": "LayerNorm", "eps": 1e-5, "weight.dtype": "float32"}, {"class": "Hand", "w.dtype": "float32"}
    assert [one.name for one in differing(side(**function), side(**hand))] == ["class"]
    assert [one.name for one in differing(side(**function), side(**{**function, "eps": 1e-3}))] == ["eps"]


LOADER = {"class": "DataLoader", "batch_size": 4, "sampler": "RandomSampler"}
LARGER, LAST = {**LOADER, "batch_size": 8}, {**LOADER, "drop_last": True}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([LOADER, LOADER], [LOADER, LARGER], ["DataLoader batch_size: 4 in the baseline, 8 in the candidate"]),
        ([LOADER, LARGER], [LARGER, LAST], ["DataLoader drop_last: not set in the baseline, True in the candidate"]),
        ([LOADER], [LARGER, LOADER], ["data loaders: 1 in the baseline, 2 (DataLoader 8 RandomSampler) in the candidate"]),
        ([LOADER, LARGER], [LARGER, LOADER], []),
    ],
)
def test_loaders_that_both_runs_have_drop_out(first: list[Any], second: list[Any], said: list[str]) -> None:
    found = differing({"settings": {"data": first}}, {"settings": {"data": second}})
    assert list(map(setting_text, found)) == said
    assert [one.severity for one in found] == ["may" if len(first) != len(second) else "changes" for _ in said]


def test_a_finding_is_shown_in_five_lines() -> None:
    lines = repr(finding(cause="lr", source="train.py:3 in train", alike=2)).splitlines()
    assert [line.strip() for line in lines] == [
        "Finding: argument, high, 0 where 0 is expected", "lr", "torch.Tensor.view in torch.Tensor.view, forward, step 0, rank 0",
        "train.py:3 in train", "2 alike, 0 deviate because of it",
    ]  # fmt: skip


@pytest.mark.parametrize("clips", [True, False])
def test_gradients_that_a_framework_added_up_out_of_sight_and_one_run_clips(tmp_path: Path, clips: bool) -> None:
    def run(*, measured: bool, clipped: bool) -> Recording:
        made, weight = Recording(), normal(8, 8, seed=9)
        passes = [normal(8, 8, seed=n) for n in (1, 2)]
        for x in passes:
            forward = made.call("aten::mm", [x, weight], [x @ weight])
            made.call("aten::mm", [x @ weight], {"grad_input.1": x}, phase="backward", forward=forward)
        read = passes[0] + passes[1]  # by no recorded call
        given = read.copy()  # and what is written to it nobody sees
        if measured:
            made.call("aten::square", [read], [square := read * read])
            made.call("aten::sum", [square], [total := square.sum(keepdims=True)])
        if clipped:
            made.call("aten::mul", [read, total], [less := read * (0.1 / total)])
            given = less.copy()
        made.call("adamw_", {"input.0": weight, "input.1": given}, [weight - given], phase="optimizer")
        return made

    said = compared(tmp_path, run(measured=False, clipped=False), run(measured=True, clipped=clips)).sentence
    assert ("gradients are clipped in the candidate only: aten::square, aten::sum, aten::mul" in said) == clips


def test_a_weight_of_another_shape_and_what_makes_a_loss_have_their_settings() -> None:
    resized = dataclasses.replace(slot("", "", "param.kernel"), shape=("(16, 2, 8)", "(16, 4, 4)"))
    heads = {"class": "Attention", "num_heads": 2}
    loss = {"class": "CrossEntropy", "label_smoothing": 0.0}
    sides = [
        {"settings": {"modules": {"a": heads | {"num_heads": n}, "CrossEntropy": loss | {"label_smoothing": share}}}}
        for n, share in ((2, 0.0), (4, 0.1))
    ]
    culprits = [finding("input", scope="a.query", slots=(resized,)), finding("region", op="tf.raw_ops.AddV2")]
    kept, left = with_causes(culprits, *sides, Seen(losses=frozenset({"tf.raw_ops.AddV2"})))
    assert [one.cause.partition(" of ")[0] for one in kept] == ["num_heads", "label_smoothing"]
    assert not left
    assert not with_causes(culprits[1:], *sides)[0][0].cause


def test_what_a_script_was_told_explains_weights_of_that_shape_and_the_model_that_holds_them() -> None:
    sides = [{"settings": {"arguments": {"hidden_dim": n}}} for n in (16, 32)]
    made = dataclasses.replace(slot("", "", "output.0"), shape=("(60, 16)", "(60, 32)"))
    drawn = finding(rule="random", slots=(made,), op="torch.Tensor.normal_")
    model = finding("operator", level="module", step=1, op="GCN")
    inner = dataclasses.replace(model, scope="gc1")
    kept, _ = with_causes([drawn, model, inner], *sides)
    assert [(one.cause, one.alike, one.scope) for one in kept] == [
        ("hidden_dim: 16 in the baseline, 32 in the candidate", 1, ""), ("", 0, "gc1"),
    ]  # fmt: skip


def test_weights_that_begin_otherwise_do_not_follow_from_micro_batches() -> None:
    passes = "the candidate goes backward 2 times in a step, the baseline once: gradients of micro-batches are added up"
    drawn, data = finding("region", op="tf.raw_ops.StatelessRandomNormalV2"), finding("input", op="split")
    seen = Seen(begun=lambda one: "initial weights differ" if one is drawn else "", weights="initial weights differ", passes=passes)
    assert [one.cause for one in with_causes([drawn, data], {}, {}, seen)[0]] == ["initial weights differ", passes]


def test_what_moves_a_weight_against_its_gradient_is_named_as_the_script_was_told_it() -> None:
    sides = [{"settings": {"arguments": {"lr": lr, "clip": 0.5}}} for lr in (2.0, 1.0)]
    moved = finding(op="torch.Tensor.add_", slots=(slot('{"alpha": -2.0}', '{"alpha": -1.0}'),))
    assert [one.cause for one in with_causes([moved], *sides)[0]] == ["lr: 2.0 in the baseline, 1.0 in the candidate"]


def operators(path: Path, first: float = 1.0, data: float = 1.0, smoothing: float = 0.0) -> Path:
    """Record two steps at level aten alone."""
    torch.manual_seed(0)
    with trueup.capture(path, level=("aten",)):
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        with torch.no_grad():
            model[2].weight.copy_(torch.tensor([[first * n for n in range(4)]] * 3) / 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            given = torch.tensor([[data * n for n in range(8)]] * 2) / 8
            loss = torch.nn.functional.cross_entropy(model(given), torch.tensor([0, 2]), label_smoothing=smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"first": 2.0}, "initial weights of 1 of 4 parameters differ (2)"),
        ({"data": 2.0}, "batches differ from step 0 on"),
        ({"smoothing": 0.1}, "only the candidate runs aten::sum, aten::neg, "),
    ],
)
def test_operators_alone_show_what_runs_begin_with(tmp_path: Path, change: dict[str, float], says: str) -> None:
    """No call of a module is recorded: what operators inside read is a weight where the optimizer reads it, too."""
    base = tmp_path.parent / "operators"
    result = trueup.compare(base if base.exists() else operators(base), operators(tmp_path / "other", **change))
    assert result.sentence.splitlines()[0].startswith(f"DEVIATES  {says}"), result.sentence
    assert len(result.culprits) == 1, result.sentence


def test_devices_draw_different_numbers_from_one_seed() -> None:
    def said(**facts: Any) -> str:
        one = finding("random", op="torch.nn.functional.dropout", **facts)
        return "\n".join(verdict_lines("deviates", [one], [], [], [], {}, otherwise=Otherwise(devices=("cpu", "npu"))))

    assert "devices draw different numbers from one seed (cpu in the baseline, npu in the candidate): draw with a CPU" in said()
    assert "devices draw" not in said(cause="seed of torch: 0 in the baseline, 7 in the candidate")


def test_advice_fits_ties_and_what_the_calls_show() -> None:
    ties = Why.NOT_COMPARED(1, Why.TIES(), None)
    lines = verdict_lines("inconclusive", [], [], [], ["a note", ties], {"compared": 3, "incomparable": 1})
    assert lines[-1].strip().startswith("next: sort stably in both runs")
    lines = verdict_lines("inconclusive", [], [], [], [], {"compared": 3}, otherwise=Otherwise(seen="gradients are clipped"))
    assert lines[-1].strip() == "next: let the candidate do there what the baseline does, and compare again"


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize(("apart", "explains"), [(1e-4, True), (0.1, False)])
def test_a_weight_decay_moves_no_weight_farther_than_it_can(kind: str, apart: float, explains: bool) -> None:
    """Adam's is divided by a running root: how far it moves a weight nobody can say."""
    sides = [{"settings": {"optimizers": [{"class": kind, "groups": [{"weight_decay": n}]}]}} for n in (1e-4, 0.0)]
    stats = TensorStats(4, -1.0, 1.0, 0.0, 2.0, 0, 0, 0, 0, 0, 0)
    read, written = (
        SlotComparison(f"{name}.fc.bias", state, error, "sketch", ("float32",) * 2, ("(4)",) * 2, stats, stats)
        for name, state, error in (("input", "equal", 0.0), ("output", "deviates", apart))
    )
    step = finding("operator", op="optimizer.step", phase="optimizer", step=1, slots=(read, written))
    (one,), left = with_causes([step], *sides, Seen(defined="SGD: Keras keeps the learning rate in its momentum"))
    assert one.cause.startswith(f"{kind} weight_decay") is (explains or kind == "Adam")
    if not one.cause.startswith(kind):
        assert one.cause == "look at how it is defined: SGD: Keras keeps the learning rate in its momentum"
        assert [setting.name for setting in left] == ["weight_decay"]


@pytest.mark.parametrize(("facts", "explains"), [
    ({"scope": "norm"}, True), ({"scope": "norm", "phase": "backward"}, False), ({"scope": "other"}, False),
    ({"scope": "norm", "level": "api"}, False),
])  # fmt: skip
def test_a_layer_that_shows_no_arguments_differs_by_its_own_setting(facts: dict[str, Any], explains: bool) -> None:
    """Of two frameworks, or of modules alone, no argument of a call is compared."""
    sides = [{"settings": {"modules": {"norm": {"class": "LayerNorm", "eps": eps}}}} for eps in (1e-5, 1e-3)]
    (one,), _ = with_causes([finding("operator", **({"level": "module", "op": "LayerNorm"} | facts))], *sides)
    assert one.cause == ("eps of norm (LayerNorm): 1e-05 in the baseline, 0.001 in the candidate" if explains else "")
