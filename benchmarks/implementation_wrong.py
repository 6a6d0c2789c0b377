"""Rows of the first table: another implementation, wrong by x."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import implementation_formulas as by_hand
from implementation_models import HALF_EPSILON, PRECISIONS, Alteration, Formula, Row, attend, unchanged

SIZES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SHOWS_IN_HALF = 1e-3


@dataclass(frozen=True)
class Part:
    """Something that a model computes and that can be written by hand. ``{}`` in the scope is the number of a layer."""

    base: str
    scope: str
    library: Formula
    hand: Formula
    at: str = "forward"
    parameters: Sequence[str] = ()
    layers: Sequence[int] = (0, 1, 2)
    near: Sequence[str] = ()

    def scopes(self, where: str) -> list[str]:
        """Return the scopes of one layer, the middle one, or of all."""
        chosen = self.layers[len(self.layers) // 2 :][:1] if where == "one layer" else self.layers
        return list(dict.fromkeys(self.scope.format(k) for k in chosen))

    def swap(self, formula: Formula, right: Formula | None, where: str, a: Alteration) -> None:
        steps = (1,) if where == "one step" else None
        for scope in self.scopes(where):
            a.swap(scope, formula, instead_of=right, at=self.at, parameters=self.parameters, steps=steps)


def library_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=weight.shape[-1] // 2)


def bert_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, 1e-12)


hand_bert_norm = partial(by_hand.layer_norm, eps=1e-12)
NORM = ("weight", "bias")
GATES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
PARTS: dict[str, Part] = {
    "norm": Part("text", "blocks.{}.ln1", by_hand.library_norm, by_hand.layer_norm, parameters=NORM),
    "gelu": Part("text", "blocks.{}", F.gelu, by_hand.gelu_by_erf, "activate"),
    "attention": Part("text", "blocks.{}.attn", attend, by_hand.attention, "attend"),
    "linear": Part("text", "blocks.{}.up", F.linear, by_hand.linear, parameters=NORM),
    "loss": Part("text", "", by_hand.library_loss, by_hand.cross_entropy, "loss", near=("head",)),
    "embedding": Part("text", "embed", by_hand.embedding, by_hand.embedding, parameters=("weight",)),
    "lstm": Part("recurrent", "lstm", by_hand.library_lstm, by_hand.lstm, parameters=GATES),
    "convolution": Part("pictures", "net.stages.{}.body.3", library_convolution, by_hand.convolution, parameters=("weight",)),
    "llama norm": Part(
        "llama", "model.layers.{}.input_layernorm", by_hand.rms_norm, by_hand.rms_norm, parameters=("weight",), layers=(0, 1)
    ),
    "gpt2 norm": Part("gpt2", "transformer.h.{}.ln_1", by_hand.library_norm, by_hand.layer_norm, parameters=NORM, layers=(0, 1)),
    "gpt2 gelu": Part("gpt2", "transformer.h.{}.mlp.act", by_hand.gelu_by_tanh, by_hand.gelu_by_tanh, layers=(0, 1)),
    "bert gelu": Part(
        "bert", "bert.encoder.layer.{}.intermediate.intermediate_act_fn", F.gelu, by_hand.gelu_by_erf, layers=(0, 1)
    ),
    "vit linear": Part(
        "vit", "vit.encoder.layer.{}.attention.attention.query", F.linear, by_hand.linear, parameters=NORM, layers=(0, 1)
    ),
    "unet norm": Part(
        "unet", "down{}.1", by_hand.library_group_norm, by_hand.group_norm, parameters=NORM, layers=(1, 2)
    ),
    "llama silu": Part("llama", "model.layers.{}.mlp.act_fn", F.silu, by_hand.silu, layers=(0, 1)),
    "bert norm": Part(
        "bert", "bert.encoder.layer.{}.attention.output.LayerNorm", bert_norm, hand_bert_norm, parameters=NORM, layers=(0, 1)
    ),
    **{
        f"norm, width {w}": Part(f"wide-{w}", "layers.{}.norm", by_hand.library_norm, by_hand.layer_norm, parameters=NORM)
        for w in (64, 256, 1024, 2048, 8192)
    },
    **{f"gelu, width {w}": Part(f"wide-{w}", "layers.{}", F.gelu, by_hand.gelu_by_erf, "activate") for w in (64, 2048, 8192)},
    "between": Part("text", "blocks.{}", unchanged, unchanged, "between"),
    "between linear layers": Part("deep", "", unchanged, unchanged, "between", near=("layers.4",)),
}


@dataclass(frozen=True)
class Mistake:
    """A wrong formula for a part; with ``sizes``, one for each, bound to what ``argument`` makes of it."""

    part: str
    name: str
    formula: Formula
    argument: str = ""
    values: Callable[[float], Any] = float
    sizes: Sequence[float] = (0.0,)
    wheres: Sequence[str] = ("one layer", "all layers", "one step")
    sides: Sequence[str] = ("library", "by hand")
    held_out: bool = False

    def formulas(self) -> Iterator[tuple[str, Formula, Sequence[str]]]:
        """Yield name, formula and the precisions in which it is tried: less than 1e-3 is tried in float32 alone."""
        for size in self.sizes:
            if self.argument:
                bound = partial(self.formula, **{self.argument: self.values(size)})
                yield f"{self.name} {size:g}", bound, PRECISIONS if size >= SHOWS_IN_HALF else ("float32",)
            else:
                yield self.name, self.formula, PRECISIONS

    def rows(self) -> Iterator[Row]:
        part = PARTS[self.part]
        for name, formula, precisions in self.formulas():
            for where in self.wheres:
                for side in self.sides if where == self.wheres[0] else self.sides[:1]:
                    right = part.library if side == "library" else part.hand
                    baseline = None if side == "library" else partial(part.swap, part.hand, None, "all layers")
                    yield Row(
                        self.part.split(",")[0],
                        f"{self.part}: {name}, {where}, baseline {side}",
                        part.base,
                        partial(self._candidate, part, formula, right, where, side),
                        baseline,
                        side if side == "library" else self.part,
                        precisions=[p for p in precisions if self._tried(p, side)],
                        near=part.near,
                        held_out=self.held_out,
                    )

    def _tried(self, precision: str, side: str) -> bool:
        """Tell whether a precision is tried: oneDNN has no LSTM under autocast for processors without AVX-512."""
        if self.part == "lstm" and precision == "autocast":
            return False
        return precision == "float32" or side == "library" or not self.argument

    @staticmethod
    def _candidate(part: Part, formula: Formula, right: Formula, where: str, side: str, a: Alteration) -> None:
        if side == "by hand" and where == "one layer":
            part.swap(part.hand, None, "all layers", a)
        part.swap(formula, right, where, a)


def plus(x: float) -> float:
    return 1.0 + x


def live(x: Tensor, *, factor: float) -> Tensor:
    return x * factor


def quadratic(x: Tensor, *, by: float) -> Tensor:
    return x * (1 + by * x)


def dead_end(x: Tensor) -> Tensor:
    x * 1.5
    return x


ONE, ALL, STEP = ("one layer",), ("all layers",), ("one step",)
MISTAKES: tuple[Mistake, ...] = (
    Mistake("norm", "unbiased variance", partial(by_hand.layer_norm, unbiased=True)),
    *(
        Mistake(f"norm, width {w}", "unbiased variance", partial(by_hand.layer_norm, unbiased=True), wheres=where)
        for w, where in ((64, ONE), (256, ONE), (1024, ONE), (2048, ONE), (8192, ALL))
    ),
    Mistake("norm", "epsilon", by_hand.layer_norm, "eps", sizes=(1e-3, 1e-2, 1e-1), wheres=ONE),
    Mistake("norm", "epsilon outside the root", partial(by_hand.layer_norm, outside=True, eps=1e-2), wheres=ONE, held_out=True),
    Mistake("norm", "scaled by 1 +", by_hand.layer_norm, "scale", plus, SIZES, ONE),
    Mistake("norm", "mean not subtracted", partial(by_hand.layer_norm, centred=False), wheres=ONE),
    Mistake("norm", "bias dropped", partial(by_hand.layer_norm, biased=False), wheres=("one layer", "one step")),
    Mistake("norm", "statistics without gradient", by_hand.detached_norm, wheres=ONE, sides=("library",)),
    Mistake("norm, width 8192", "scaled by 1 +", by_hand.layer_norm, "scale", plus, (1e-5, 1e-4, 1e-2), ONE),
    Mistake("gelu", "tanh for erf", by_hand.gelu_by_tanh),
    Mistake("gelu", "sigmoid for erf", by_hand.gelu_by_sigmoid, wheres=ONE, held_out=True),
    Mistake("gelu", "scaled by 1 +", by_hand.gelu_by_erf, "scale", plus, SIZES, ONE),
    Mistake("gelu, width 2048", "tanh for erf", by_hand.gelu_by_tanh, wheres=ONE),
    Mistake("attention", "scale missing", partial(by_hand.attention, scale=math.sqrt(8.0)), wheres=("one layer", "one step")),
    Mistake("attention", "scale doubled", partial(by_hand.attention, scale=8**-0.5), wheres=("one layer", "all layers")),
    Mistake("attention", "temperature 1 +", by_hand.attention, "scale", plus, SIZES, ONE),
    Mistake("attention", "mask value -", by_hand.attention, "masked", lambda x: -x, (1.0, 5.0, 10.0), ONE, held_out=True),
    Mistake("attention", "softmax over queries", partial(by_hand.attention, axis=-2), wheres=ONE, held_out=True),
    Mistake("attention", "mask one to the right", partial(by_hand.attention, shift=1), wheres=ONE),
    Mistake("linear", "bias dropped", partial(by_hand.linear, biased=False), wheres=ONE),
    Mistake("linear", "scaled by 1 +", by_hand.linear, "scale", plus, (1e-5, 3e-4, 1e-2), ONE),
    Mistake("loss", "temperature 1 +", by_hand.cross_entropy, "temperature", plus, (1e-4, 1e-2), ONE),
    Mistake("loss", "smoothing", by_hand.cross_entropy, "smoothing", sizes=(1e-4, 1e-2), wheres=ONE),
    Mistake("loss", "mean over padding", partial(by_hand.cross_entropy, over_all=True), wheres=("one layer", "one step")),
    Mistake("embedding", "scaled by 1 +", by_hand.embedding, "scale", plus, (1e-4, 1e-2), ONE, ("library",)),
    Mistake("lstm", "forget gate plus", by_hand.lstm, "forget", sizes=(1e-4, 1e-2, 1.0), wheres=ONE),
    Mistake("lstm", "gates in another order", partial(by_hand.lstm, gates="figo"), wheres=ONE, held_out=True),
    Mistake("convolution", "scaled by 1 +", by_hand.convolution, "scale", plus, (1e-4, 1e-2), ONE, held_out=True),
    Mistake("llama norm", "epsilon", by_hand.rms_norm, "eps", sizes=(1e-4, 1e-2), wheres=ALL, sides=("library",)),
    Mistake("llama norm", "weight plus one", partial(by_hand.rms_norm, offset=1.0), wheres=ONE, sides=("library",), held_out=True),
    Mistake("gpt2 norm", "unbiased variance", partial(by_hand.layer_norm, unbiased=True), wheres=ONE, sides=("library",)),
    Mistake("gpt2 gelu", "root rounded to 0.7978", partial(by_hand.gelu_by_tanh, root=0.7978), wheres=ALL, sides=("library",)),
    Mistake("bert gelu", "tanh for erf", by_hand.gelu_by_tanh, wheres=ONE, sides=("library",), held_out=True),
    Mistake("vit linear", "scaled by 1 +", by_hand.linear, "scale", plus, (1e-4, 1e-2), ONE, ("library",)),
    Mistake("unet norm", "unbiased variance", partial(by_hand.group_norm, unbiased=True), wheres=ALL, held_out=True),
    Mistake("unet norm", "epsilon", by_hand.group_norm, "eps", sizes=(1e-3, 1e-1), wheres=ONE, sides=("library",), held_out=True),
    Mistake("llama silu", "beta 1 +", by_hand.silu, "beta", plus, (1e-4, 1e-2, 1e-1), ONE, held_out=True),
    Mistake("bert norm", "unbiased variance", partial(hand_bert_norm, unbiased=True), wheres=ONE + STEP, held_out=True),
    Mistake("norm", "rounded before the weight", by_hand.rounded_norm, wheres=ONE + ALL, sides=("library",), held_out=True),
    Mistake("attention", "query's gradient lost", by_hand.attention_without_query_gradient, wheres=ONE, held_out=True),
    Mistake("linear", "bias twice", by_hand.linear_with_bias_twice, wheres=ONE + STEP, sides=("library",), held_out=True),
    Mistake("gpt2 gelu", "cubic", by_hand.gelu_by_tanh, "cubic", float, (0.045, 0.05), ALL, ("library",), held_out=True),
    Mistake("norm", "epsilon 1e-3 outside the root", partial(by_hand.layer_norm, outside=True, eps=1e-3), wheres=ONE),
    Mistake("between", "x * (1 + x *", quadratic, "by", sizes=SIZES, wheres=ONE, sides=("library",)),
    Mistake("between", "x *", live, "factor", sizes=(1.0003, 1.5), sides=("library",)),
    Mistake("between linear layers", "x *", live, "factor", sizes=(1.0003, 1.5), wheres=ONE + STEP, sides=("library",)),
)


# ---------------------------------------------------------------- optimizers and what surrounds them
def optimized(update: by_hand.Update, right: by_hand.Update | None, steps: Sequence[int] | None, a: Alteration) -> None:
    has_epsilon = by_hand.momentum not in (update, right)
    eps = {"eps": HALF_EPSILON} if a.precision == "float16" and has_epsilon else {}
    a.optimize(partial(update, **eps), instead_of=None if right is None else partial(right, **eps), steps=steps)


UPDATES: dict[str, by_hand.Update] = {
    "decay lost": partial(by_hand.adamw, decay=0.0),
    "decay doubled": partial(by_hand.adamw, decay=0.2),
    "decay times 1.01": partial(by_hand.adamw, decay=0.101),
    "decay coupled": partial(by_hand.adamw, coupled=True),
    "no decay of biases": partial(by_hand.adamw, on_biases=False),
    "moments not written": partial(by_hand.adamw, keeps=False),
    "second moment not written": by_hand.adamw_without_second_moment,
    "moments uncorrected": partial(by_hand.adamw, corrected=False),
    "second beta 0.99": partial(by_hand.adamw, betas=(0.9, 0.99)),
    "rate times 1.01": partial(by_hand.adamw, lr=1.01e-3),
}


MOVED = 3
"""Steps until level module sees a moment that was not kept: the second update is made of it, and the third forward reads that."""
HELD_OUT = ("decay coupled", "second beta 0.99", "no decay of biases")


def optimizer_rows() -> Iterator[Row]:
    baseline = partial(optimized, by_hand.adamw, None, None)
    for name, update in UPDATES.items():
        for where, steps in {"all steps": None, "one step": (1,)}.items():
            if where == "one step" and name not in ("decay lost", "moments not written"):
                continue
            change = partial(optimized, update, by_hand.adamw, steps)
            yield Row(
                "optimizer", f"adamw: {name}, {where}", "text", change, baseline, "adamw", held_out=name in HELD_OUT, steps=MOVED,
                levels=("api", "aten") if steps else ("module", "api", "aten"),  # the step after it is not read
            )  # fmt: skip
    right = partial(optimized, by_hand.momentum, None, None)
    for name, wrong in {"dampened": {"dampening": 0.9}, "ahead": {"nesterov": True}}.items():
        change = partial(optimized, partial(by_hand.momentum, **wrong), by_hand.momentum, None)
        yield Row("optimizer", f"sgd: {name}", "deep", change, right, "sgd", held_out=name == "ahead", steps=MOVED)


# ---------------------------------------------------------------- calls that one run makes and the other does not
def inserted(formula: Formula, where: str, part: str, a: Alteration) -> None:
    PARTS[part].swap(formula, unchanged, where, a)


def extra_rows() -> Iterator[Row]:
    for part in ("between", "between linear layers"):
        for where in ONE + STEP if part == "between linear layers" else ONE + ALL + STEP:
            change = partial(inserted, dead_end, where, part)
            scopes = PARTS[part].scopes(where)
            levels = ("api", "aten")  # level module records no call between modules
            common = {"levels": levels, "missing": levels, "places": scopes, "precisions": ("float32", "bfloat16")}
            yield Row("dead end", f"{part}: x * 1.5 that nobody reads, {where}", PARTS[part].base, change, **common)
            if where != "one step":
                against = f"{part} {where}"
                yield Row("dead end", f"{part}: branch cut, {where}", PARTS[part].base, lambda _: None, change, against, **common)


def scaled_input(factor: float, a: Alteration) -> None:
    a.swap("", partial(live, factor=factor), instead_of=unchanged, at="prepare")


def changed_data(factor: float, a: Alteration) -> None:
    for batch in a.training.batches:
        batch["pictures"] = batch["pictures"] * factor
    a.note("", factor - 1.0, "data")


def data_rows() -> Iterator[Row]:
    for factor in (1.0001, 1.01, 1.1):
        yield Row("input", f"pictures times {factor} in the model", "deep", partial(scaled_input, factor), near=("layers.0",))
        yield Row("input", f"pictures times {factor} in the data", "deep", partial(changed_data, factor))


def scaled_gradients(factor: float, a: Alteration) -> None:
    optimizer = a.training.optimizer
    plain = optimizer.step

    def step(*arguments: Any) -> Any:
        with torch.no_grad():
            for p in a.training.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor)
        return plain(*arguments)

    setattr(optimizer, "step", step)  # noqa: B010 - mypy wants no method assigned
    a.note("", abs(factor - 1.0), "optimizer")


def gradient_rows() -> Iterator[Row]:
    for factor in (1.001, 0.5, 2.0):
        yield Row("gradient", f"gradients times {factor}", "text", partial(scaled_gradients, factor))


def dropped_layer(scope: str, a: Alteration) -> None:
    """Let a module return what it is given."""
    parent, _, name = scope.rpartition(".")
    setattr(a.module(parent), name, nn.Identity())
    a.note(scope, 1.0)


def rows() -> list[Row]:
    found = [row for mistake in MISTAKES for row in mistake.rows()]
    found += [*optimizer_rows(), *extra_rows(), *data_rows(), *gradient_rows()]
    for scope in ("blocks.1.ln1", "blocks.1.attn", "norm"):
        name, places = f"{scope} is an Identity", (scope, scope.rpartition(".")[0])
        found.append(Row("layer dropped", name, "text", partial(dropped_layer, scope), places=places))
    return found
