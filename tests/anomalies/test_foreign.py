"""Models that nobody here wrote: silent while they are healthy, and the right origin where an overflow is planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from anomalies.planted import train
from anomalies.test_planted import judged

ALL = ("module", "api", "aten")


def llama(half: bool = False) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Eager attention, left padding: its masks are made of the dtype's smallest number."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=16, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).half() if half else LlamaForCausalLM(config)
    ids, mask = torch.randint(3, 64, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    return model, lambda _: model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def t5() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Relative positions: the logarithm of 0 is cast to an integer, and `where` leaves it out."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    ids = torch.randint(3, 64, (2, 8))
    return model, lambda _: model(input_ids=ids, labels=ids[:, :4].contiguous()).loss


def ctc() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A target that is longer than its input has an infinite loss, which is left out."""
    model, x = nn.Linear(8, 6), torch.randn(3, 10, 8)
    targets, lengths, sizes = torch.randint(1, 6, (3, 4)), torch.tensor([10, 8, 3]), torch.tensor([4, 3, 4])
    return model, lambda _: F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), targets, lengths, sizes, zero_infinity=True)


def nucleus() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Top-p sampling: what is left out is -Inf before the softmax."""
    model, x = nn.Linear(8, 16), torch.randn(4, 8)

    def loss(_: int) -> Tensor:
        logits, order = model(x).sort(descending=True)
        out = logits.softmax(-1).cumsum(-1).roll(1, -1) > 0.7
        out[..., 0] = False
        kept = torch.full_like(logits, -math.inf).scatter(1, order, logits.masked_fill(out, -math.inf))
        return kept.softmax(-1).square().mean() + F.nll_loss(kept.log_softmax(-1), kept.argmax(-1))

    return model, loss


def transformer() -> tuple[nn.Module, Callable[[int], Tensor]]:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    source, target, padding = torch.randn(2, 5, 16), torch.randn(2, 4, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return model, lambda _: model(
        source, target, tgt_mask=mask, src_key_padding_mask=padding.float() * -1e30, memory_key_padding_mask=padding.float() * -1e30
    ).square().mean()  # fmt: skip


@pytest.mark.parametrize("case", [llama, ctc, nucleus, transformer], ids=lambda case: case.__name__)
def test_healthy_models_are_silent(case: Callable[[], tuple[nn.Module, Callable[[int], Tensor]]], tmp_path: Path) -> None:
    for levels in (("api",), ALL):
        result = judged(tmp_path / "+".join(levels), lambda: train(*case(), steps=2), *levels)
        assert result.exit_code == 0, result.sentence
        assert [one.sentence for one in result.anomalies if one.matters != "harmless"] == []


def test_a_cast_of_infinity_that_is_left_out_is_harmless(tmp_path: Path) -> None:
    result = judged(tmp_path / "run", lambda: train(*t5(), steps=1), "api")
    assert (result.verdict, result.exit_code) == ("harmless", 0), result.sentence
    assert {one.place.op for one in result.anomalies} == {"torch.log"}
    assert all(one.transient and one.healed_by for one in result.anomalies)


@pytest.mark.parametrize("levels", [("api",), ("aten",), ALL], ids="+".join)
def test_an_overflow_beside_masks_is_named_and_the_masks_are_not(levels: tuple[str, ...], tmp_path: Path) -> None:
    def overflowing() -> None:
        model, loss = llama(half=True)
        with torch.no_grad():
            for name in ("q_proj", "k_proj"):
                model.get_submodule(f"model.layers.1.self_attn.{name}").weight.mul_(30_000)  # type: ignore[operator, union-attr]
        train(model, loss, steps=2)

    result = judged(tmp_path / "run", overflowing, *levels)
    assert result.first is not None
    assert (result.first.kind, result.first.place.scope) == ("overflow", "model.layers.1.self_attn"), result.sentence
    assert result.first.place.op in ("torch.matmul", "aten::bmm")
    assert [one.sentence for one in result.anomalies[1:] if one.matters != "harmless"] == []


def test_a_loss_of_nothing_without_a_bad_gradient_is_harmless(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 4), torch.from_numpy(np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32))
    ignored = torch.full((3,), -100)
    result = judged(tmp_path / "run", lambda: train(model, lambda _: F.cross_entropy(model(x), ignored), steps=1), "api")
    assert result.first is not None
    assert (result.first.kind, result.first.matters) == ("nan", "harmless"), result.sentence
    assert result.first.because == "the loss is bad, and no gradient that came of it is"


def test_before_migrating_small_gradients_are_a_note_with_the_loss_scale_they_ask_for(tmp_path: Path) -> None:
    def small() -> None:
        model, loss = llama()
        train(model, lambda step: loss(step) * 1e-4, steps=2)

    assert judged(tmp_path / "run", small, "api").verdict == "clean"
    result = trueup.overflow(tmp_path / "run", would_overflow="fp16")
    assert (result.verdict, result.anomalies) == ("clean", ()), result.sentence
    (note,) = [note for note in result.notes if "loss scale" in note]
    assert "gradients are typically below the smallest normal float16: a loss scale of 2**" in note
    assert "lifts nine of ten" in note
