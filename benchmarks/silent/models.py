"""Silent bugs inside a model: another formula, another setting, another precision than the one that was asked for."""

from __future__ import annotations

import math
from itertools import cycle, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Form, Place, Training, case
from silent.language import Batch, Decoder, adamw, batches, left_padded, next_word_loss
from zoo import images, text


def transformer(name: str, **settings: Any) -> nn.Module:
    """Build a small causal model of `transformers` with random weights."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(text.vocabulary()), num_key_value_heads=2, use_cache=False, attn_implementation="eager",
        **sizes | settings,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def trained(model: nn.Module, source: Any) -> Training:
    """Train a model of `transformers` with its own loss."""
    optimizer = adamw(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = own_loss(model, next(source))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "left-padding-shifts-positions", "huggingface/trl#469",
    "GPT-2 numbers positions from the left whatever the attention mask, so that padding on the left shifts the sentence.",
    Place("embedding|arange|unsqueeze|cumsum|masked_fill|sub|clamp", scope=r"(transformer(\.wpe)?)?"),
)  # fmt: skip
def left_padding_shifts_positions(form: Form) -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(text.vocabulary()), n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False,
        attn_implementation="eager", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip

    def positions(batch: Batch) -> Batch:
        padded = left_padded(batch)
        if form == "buggy":
            return padded
        return padded | {"position_ids": (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)}

    return trained(GPT2LMHeadModel(config), map(positions, batches()))


@case(
    "rotary-angles-in-bf16", "huggingface/transformers#29285",
    "The angles of rotary embeddings are computed in bfloat16, which cannot count beyond 256.",
    Place(scope=r"model\.rotary_emb"), precision="bfloat16",
)  # fmt: skip
def rotary_angles_in_bf16(form: Form) -> Training:
    model = transformer("Llama").bfloat16()
    rotary = model.model.rotary_emb

    def by_hand(x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        inner = x.dtype if form == "buggy" else torch.float32
        with torch.no_grad():
            angles = places[..., None].to(inner) * rotary.inv_freq.to(inner)
            both = torch.cat((angles, angles), -1)
            return both.cos().to(x.dtype), both.sin().to(x.dtype)

    if form != "correct":
        rotary.forward = by_hand
    words = [word for batch in islice(batches(), 4) for word in batch["input_ids"][batch["attention_mask"] == 1].tolist()]
    line = torch.tensor([list(islice(cycle(words), 320))])
    return trained(model, cycle([{"input_ids": line, "labels": line}]))


@case(
    "gelu-exact-for-tanh", "huggingface/transformers#29402",
    "Gemma runs the exact GELU though its weights were trained with the approximation by tanh.",
    Place("gelu|erf|tanh", scope=r"model\.layers\.0\.mlp.*"),
)  # fmt: skip
def gelu_exact_for_tanh(form: Form) -> Training:
    exact = {"hidden_act": "gelu", "hidden_activation": "gelu"}
    model = transformer("Gemma", **exact if form == "buggy" else {"hidden_act": "gelu_pytorch_tanh"})
    if form == "again":
        for layer in model.model.layers:
            layer.mlp.act_fn = TanhGelu()
    return trained(model, batches())


class TanhGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@case(
    "norm-rounds-before-weight", "huggingface/text-generation-inference#1658",
    "Gemma's norm is rounded to bfloat16 before it is multiplied by one plus the weight, not after.",
    Place(scope=r"model\.layers\.0\.input_layernorm"), precision="bfloat16",
)  # fmt: skip
def norm_rounds_before_weight(form: Form) -> Training:
    model = transformer("Gemma")
    for module in model.modules():
        if type(module).__name__ == "GemmaRMSNorm":
            nn.init.normal_(module.weight, std=0.3)
            if form != "correct":
                module.forward = normed(module, early=form == "buggy")
    return trained(model.bfloat16(), batches())


def normed(norm: Any, early: bool) -> Any:
    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        if early:
            return scaled.to(x.dtype) * (1 + norm.weight)
        return (scaled * (1 + norm.weight.float())).to(x.dtype)

    return forward


class Patches(nn.Module):
    """A classifier of pictures that begins with normed patches."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 32, 8, 8)
        self.norm = nn.LayerNorm(32, eps=1e-5 if form == "buggy" else 1e-12)
        self.mix, self.head = nn.Linear(32, 32), nn.Linear(32, len(images.TEXTURES))
        self.by_hand = form == "again"

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.cut(pictures).flatten(2).transpose(1, 2)
        if self.by_hand:
            centred = x - x.mean(-1, keepdim=True)
            x = centred / (centred.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
            x = x * self.norm.weight + self.norm.bias
        else:
            x = self.norm(x)
        return self.head(F.gelu(self.mix(x)).mean(1))


def classified(model: nn.Module, scale: float = 1.0) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    source = cycle(images.textures(2, 32))

    def step() -> Tensor:
        pictures, labels = next(source)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures * scale), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "norm-ignores-configured-epsilon", "huggingface/transformers#20699",
    "The layer norm behind the patches runs with 1e-5, the default, and not with the 1e-12 of the configuration.",
    Place("layer_norm", scope="norm", setting="eps"),
)  # fmt: skip
def norm_ignores_configured_epsilon(form: Form) -> Training:
    return classified(Patches(form), scale=0.05)


@case(
    "batch-norm-momentum-inverted", "pytorch/vision#8250",
    "The batch norms were given TensorFlow's momentum of 0.99, which PyTorch means the other way round.",
    Place("batch_norm|add_|mul_|lerp_", scope=r"1", setting="momentum"),
)  # fmt: skip
def batch_norm_momentum_inverted(form: Form) -> Training:
    momentum = 0.99 if form == "buggy" else 0.01
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(), nn.Conv2d(8, 16, 3, 2),
        nn.BatchNorm2d(16, momentum=momentum), nn.ReLU(), nn.Flatten(), nn.Linear(784, len(images.TEXTURES)),
    )  # fmt: skip
    return classified(model)


@case(
    "causal-mask-at-the-wrong-corner", "pytorch/pytorch#103082",
    "Attention with remembered keys asks for a causal mask, which starts at the upper left where it should end at the lower right.",
    Place("scaled_dot_product|ones|tril|masked_fill|softmax", scope=""),
)  # fmt: skip
def causal_mask_at_the_wrong_corner(form: Form) -> Training:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = query[:, :, -8:]  # the last eight positions; of those before, only keys and values are left
        if form == "buggy":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        visible = torch.ones(8, key.shape[2], dtype=torch.bool).tril(key.shape[2] - 8)
        if form == "correct":
            return F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        scores = (query @ key.transpose(-2, -1)) / math.sqrt(key.shape[-1])
        return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value

    class Remembering(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            block = self.blocks[0]
            normed = block.norm1(x)
            query, key, value = (
                t.view(*x.shape[:2], 4, -1).transpose(1, 2) for t in block.attention.qkv(normed).chunk(3, -1)
            )
            mixed = attend(query, key, value).transpose(1, 2).reshape(x.shape[0], 8, -1)
            return self.head(self.norm(x[:, -8:] + block.attention.out(mixed)))

    return trained_decoder(Remembering(), tail=8)


def trained_decoder(model: nn.Module, tail: int = 0) -> Training:
    """Train a decoder on the next word, of the last ``tail`` positions where it gives only those."""
    optimizer, source = adamw(model), batches()

    def step() -> Tensor:
        batch = left_padded(next(source))
        optimizer.zero_grad()
        if tail:
            logits = model(batch["input_ids"][:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, -tail:].flatten(), ignore_index=text.IGNORED)
        else:
            loss = next_word_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "rotary-positions-doubled", "ml-explore/mlx-lm#1545",
    "Every position is multiplied by a hard-coded 2 before the rotation, whatever the configured scaling.",
    Place(scope=r"model\.rotary_emb"),
)  # fmt: skip
def rotary_positions_doubled(form: Form) -> Training:
    model = transformer("Llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward
    if form == "buggy":
        rotary.forward = lambda x, position_ids: plain(x, 2 * position_ids)
    return trained(model, batches())
