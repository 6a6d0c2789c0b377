"""What people forget: the mask of a padded batch, dropout, the evaluation mode, the right base of a rotary embedding. Each is one
culprit; what follows from it (masks drawn later, products of what has no mask, a loss of other targets) is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueup

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32,
    "attn_implementation": "eager",
}  # fmt: skip
Batch = dict[str, torch.Tensor]


def trained(
    into: Path, model: nn.Module, change: Callable[[Batch], Batch] = dict, *, pieces: int = 1, divided: float = 1.0,
    level: str = "api", decays: Callable[[torch.Tensor], bool] = lambda weight: weight.ndim > 1,
) -> Path:  # fmt: skip
    """Train two steps, no modules recorded, on batches of four sequences of which two are padded."""
    groups = [{"params": [p for p in model.parameters() if decays(p) == wanted], "weight_decay": 0.1 * wanted} for wanted in (1, 0)]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)
    torch.manual_seed(1)
    with trueup.capture(into, level=level, detail="stats") as capture:
        for step in range(2):
            ids = torch.randint(5, 60, (4, 16), generator=torch.Generator().manual_seed(step))
            padding = (torch.arange(16) < 12) | torch.tensor([[True], [False], [True], [False]])
            batch = change({"input_ids": ids, "labels": ids.clone(), "attention_mask": padding.long()})
            for rows in torch.arange(4).chunk(pieces):
                (model(**{name: value[rows] for name, value in batch.items()}).loss / divided).backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return into


def bert(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(max_position_embeddings=16, **{**SIZES, **options})).train()


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=16, **{**SIZES, **options})).train()


def without_dropout(model: nn.Module) -> nn.Module:
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    return model


def unmasked(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def shifted(batch: Batch) -> Batch:
    return batch | {"labels": batch["labels"].roll(-1, 1)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return trained(tmp_path_factory.mktemp("base") / "run", bert())


@pytest.mark.parametrize(("model", "change", "op", "scope"), [
    (bert, unmasked, "torch.ones", "bert"),  # the model takes ones of float32 for it, and the batch had integers
    (bert, shifted, "torch.Tensor.roll", ""),
    (lambda: bert().eval(), dict, "torch.nn.functional.dropout", "bert.embeddings.dropout"),
    (lambda: without_dropout(bert()), dict, "torch.nn.functional.dropout", "bert.encoder.layer.0.attention.self.dropout"),
])  # fmt: skip
def test_what_is_forgotten_is_one_culprit(
    model: Callable[[], nn.Module], change: Callable[[Batch], Batch], op: str, scope: str, base: Path, tmp_path: Path
) -> None:
    result = trueup.compare(base, trained(tmp_path / "run", model(), change))
    assert [(one.op, one.scope) for one in result.culprits] == [(op, scope)], result.sentence


def test_what_is_forgotten_among_operators_is_one_culprit(tmp_path: Path) -> None:
    """Weights have no names there but those of the operators that read them; a draw of the next step is no other culprit."""
    base = trained(tmp_path / "base", bert(num_hidden_layers=1), level="aten")
    decayed = trained(tmp_path / "decayed", bert(num_hidden_layers=1), level="aten", decays=lambda weight: True)
    drawn = trained(tmp_path / "drawn", without_dropout(bert(num_hidden_layers=1)), level="aten")
    results = [trueup.compare(base, other) for other in (decayed, drawn)]
    assert [[one.phase for one in result.culprits] for result in results] == [["optimizer"], ["forward"]]
    assert all(result.verdict == "deviates" for result in results)
    assert results[0].sentence.startswith("DEVIATES  AdamW weight_decay of 16 parameters (bert.embeddings.LayerNorm.weight")


def test_a_constant_of_a_module_is_no_batch(tmp_path: Path) -> None:
    runs = [trained(tmp_path / str(base), llama(rope_theta=base)) for base in (10_000.0, 500.0)]
    first = trueup.compare(*runs).sentence.splitlines()[0]
    assert first == "DEVIATES  a constant that model.rotary_emb reads differs from step 0 on"


@pytest.mark.parametrize(("divided", "verdict"), [(2.0, "aligned"), (1.0, "deviates")])
def test_a_gradient_of_which_nothing_is_left_agrees_in_micro_batches(divided: float, verdict: str, tmp_path: Path) -> None:
    """That of a bias of keys is zero but for rounding."""
    plain = {"num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    whole = trained(tmp_path / "whole", bert(**plain))
    found = trueup.compare(whole, trained(tmp_path / "pieces", bert(**plain), pieces=2, divided=divided))
    assert found.verdict == verdict, found.sentence
