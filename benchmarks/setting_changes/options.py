"""What the trainings of `settings` can be set to, the changes that are made to it, and what a verdict must say of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Options:
    """What a training is set to; the defaults are the baseline's."""

    optimizer: str = "adamw"
    lr: float = 1e-2
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.1
    decays_biases: bool = False
    nesterov: bool = False
    schedule_steps: int = 1
    """How often the schedule is stepped per step."""
    clip: float = 0.0
    """Norm that gradients are clipped to, by the framework's own function; 0: they are not."""
    clip_by_hand: float = 0.0
    micro: int = 1
    """Micro-batches per step."""
    divides: bool = True
    """Whether the loss of a micro-batch is divided by their number."""
    seed: int = 0
    order: int = 0
    """Seed of the shuffling."""
    batch: int = 4
    drop_last: bool = False
    dropout: float = 0.1
    trains: bool = True
    """Whether the model is in training mode."""
    tied: bool = False
    frozen: bool = False
    autocast: bool = False
    half: bool = False
    """Whether the weights are bfloat16."""
    precision: str = "highest"
    """Of products in float32: ``highest`` or ``medium``."""
    deviation: float = 0.0
    """Standard deviation of the head's first weights; 0: as the framework draws them."""
    pads_left: bool = False
    masks: bool = True
    smoothing: float = 0.0
    reduction: str = "mean"
    scale: float = 1.0
    """What the loss is multiplied by before the backward."""
    norm_eps: float = 1e-5
    approximate: bool = False
    """Whether GELU is approximated by tanh."""
    draws: int = 0
    """Random numbers that the script draws for nothing."""
    zeroes: bool = True
    """Whether gradients are forgotten after a step."""
    checkpoint: int = 0
    """Another number: other weights are loaded before the capture begins."""
    heads: int = 2


@dataclass(frozen=True)
class Change:
    """A setting that is changed in the candidate."""

    name: str
    candidate: Mapping[str, Any]
    says: str
    """Regular expression: what names the cause."""
    both: Mapping[str, Any] = field(default_factory=dict)
    """What both runs are set to."""
    without: tuple[str, ...] = ()
    """Scripts in which it makes no sense."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Options without which it changes nothing."""

    def options(self, base: Options = Options()) -> tuple[Options, Options]:
        """Return the baseline's options and the candidate's."""
        first = dataclasses.replace(base, **self.both)
        return first, dataclasses.replace(first, **self.candidate)


SGD = {"optimizer": "sgd"}
LOSS = r"loss (is|of) .*(times|/)|(divided|multiplied|scaled) by"
CHANGES = {one.name: one for one in (
    Change("lr", {"lr": 1.1e-2}, r"\b(lr|learning_rate): 0\.01 .*0\.011"),
    Change("beta2", {"beta2": 0.99}, r"\bbeta_?2: 0\.999 .*0\.99", needs={"optimizer": "adamw"}),
    Change("eps", {"eps": 1e-6}, r"\beps(ilon)?: 1e-08 .*1e-06", needs={"optimizer": "adamw"}),
    Change("weight-decay", {"decay": 0.01}, r"weight_decay( of [^:]+)?: .*0\.1\b.* 0\.01"),
    Change("decay-on-biases", {"decays_biases": True}, r"weight_decay( of [^:]+)?: |exclude_from_weight_decay|apply_decay"),
    Change("schedule-twice", {"schedule_steps": 2}, r"\b(lr|learning_rate): .*from step 1|schedule"),
    Change("clip", {"clip": 0.1}, r"clip|max_grad_norm"),
    Change("clip-by-hand", {"clip_by_hand": 0.1}, r"clip", without=("trainer",)),
    Change("accumulation-divisor", {"divides": False}, rf"{LOSS}|accumul", both={"micro": 2}, without=("trainer", "lightning")),
    Change("accumulation", {"micro": 2}, r"accumul|micro-batch"),
    Change("seed", {"seed": 7}, r"\bseed of"),
    Change("order", {"order": 7}, r"batches (in another order|differ)|data_seed|shuffle"),
    Change("batch-size", {"batch": 3}, r"batch_?size|batches differ"),
    Change("drop-last", {"drop_last": True}, r"drop_(last|remainder)"),
    Change("dropout", {"dropout": 0.2}, r"(\bp\b|dropout|rate).*0\.1.*0\.2"),
    Change("eval", {"trains": False}, r"training (mode )?of .*True .*False|evaluat", without=("keras", "trainer")),
    Change("nesterov", {"nesterov": True}, r"nesterov", both=SGD),
    Change("optimizer-class", {"optimizer": "adam"}, r"optimizer: AdamW .*Adam\b"),
    Change("tied", {"tied": True}, r"\btied|tie_word", without=("keras",)),
    Change("frozen", {"frozen": True}, r"frozen|trainable"),
    Change("autocast", {"autocast": True}, r"bfloat16", without=("paddle",)),
    Change("half", {"half": True}, r"bfloat16", without=("paddle",)),
    Change("matmul-precision", {"precision": "medium"}, r"float32_matmul_precision|tensor_float_32", without=("paddle",)),
    Change("init", {"deviation": 0.5}, r"\bstd\b.*0\.5|initial"),
    Change("other-weights", {"checkpoint": 2}, r"initial weights", both={"checkpoint": 1}),
    Change("padding", {"pads_left": True}, r"batches differ"),
    Change("mask", {"masks": False}, r"mask"),
    Change("label-smoothing", {"smoothing": 0.1}, r"label_smooth"),
    Change("loss-reduction", {"reduction": "sum"}, rf"reduction|{LOSS}", without=("trainer",)),
    Change("loss-scale", {"scale": 128.0}, rf"({LOSS}).*128|128 times", without=("trainer",)),
    Change("norm-eps", {"norm_eps": 1e-3}, r"eps(ilon)? of .*1e-05 .*0\.001"),
    Change("gelu", {"approximate": True}, r"approximate|activation|Activation"),
    Change("random-draw", {"draws": 5}, r"random numbers are drawn in the candidate only", without=("keras",)),
    Change("zero-grad", {"zeroes": False}, r"not cleared", without=("trainer", "lightning", "keras")),
    Change("heads", {"heads": 4}, r"num_heads|n_head"),
)}  # fmt: skip
