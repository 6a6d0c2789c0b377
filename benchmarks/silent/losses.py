"""Silent bugs of the loss: what it averages over, how often it is scaled, which positions count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Form, Place, Training, case
from silent.language import Attention, Batch, Decoder, adamw, batches, next_word_loss, shifted
from zoo import images, text

PARTS = 2
"""Micro-batches of a step."""


def parts(batch: Batch) -> list[Batch]:
    return [{name: rows[k::PARTS] for name, rows in batch.items()} for k in range(PARTS)]


@case(
    "accumulation-averages-averages", "huggingface/transformers#34191",
    "Each micro-batch divides its loss by its own number of words, not by that of the whole batch.",
    Place("cross_entropy|nll_loss|div", scope=""),
)  # fmt: skip
def accumulation_averages_averages(form: Form) -> Training:
    model, source = Decoder(), batches()
    optimizer = adamw(model)

    def loss(part: Batch, words: Tensor) -> Tensor:
        tokens, labels = shifted(part)
        logits = model(tokens).flatten(0, 1)
        if form == "correct":
            return F.cross_entropy(logits, labels.flatten(), ignore_index=text.IGNORED, reduction="sum") / words
        if form == "buggy":
            return F.cross_entropy(logits, labels.flatten(), ignore_index=text.IGNORED) / PARTS
        counted = labels.flatten() != text.IGNORED
        chosen = logits.log_softmax(-1).gather(1, labels.flatten().clamp(min=0)[:, None])[:, 0]
        return -(chosen * counted).sum() / words

    def step() -> Tensor:
        batch, total = next(source), torch.zeros(())
        words = (shifted(batch)[1] != text.IGNORED).sum()
        optimizer.zero_grad()
        for part in parts(batch):
            one = loss(part, words)
            one.backward()
            total += one.detach()
        optimizer.step()
        return total

    return Training(model, step)


@case(
    "accumulation-divides-twice", "huggingface/accelerate#3533",
    "The trainer and the library below it both divide the loss by the number of micro-batches.",
    Place("div", scope=""),
)  # fmt: skip
def accumulation_divides_twice(form: Form) -> Training:
    model, source = Decoder(), batches()
    optimizer = adamw(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in parts(next(source)):
            loss = next_word_loss(model, part)
            loss = loss * (1 / PARTS) if form == "again" else loss / PARTS
            if form == "buggy":
                loss = loss / PARTS
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return Training(model, step)


@case(
    "accumulation-never-divides", "huggingface/transformers#35438",
    "The loss of each micro-batch enters whole, so that the gradient grows with their number.",
    Place("div|nll_loss|cross_entropy", scope=""),
)  # fmt: skip
def accumulation_never_divides(form: Form) -> Training:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(784, len(images.TEXTURES))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    data = images.textures(2, 32)

    def step() -> Tensor:
        pictures, labels = data[0]
        optimizer.zero_grad()
        total = torch.zeros(())
        for k in range(PARTS):
            loss = F.cross_entropy(model(pictures[k::PARTS]), labels[k::PARTS])
            if form != "buggy":
                loss = loss / PARTS
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return Training(model, step)


@case(
    "smoothing-counts-ignored", "pytorch/pytorch#73205",
    "The smoothed part of the cross entropy is averaged over padding too.",
    Place("cross_entropy|log_softmax|nll_loss|mean|sum|mul|add|masked_fill|div", scope=""),
)  # fmt: skip
def smoothing_counts_ignored(form: Form) -> Training:
    model, source = Decoder(), batches()
    optimizer = adamw(model)

    def by_hand(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        logs, counted = logits.log_softmax(-1), labels != text.IGNORED
        hard = F.nll_loss(logs, labels, ignore_index=text.IGNORED)
        soft = -logs.mean(-1)
        even = soft.mean() if form == "buggy" else (soft * counted).sum() / counted.sum()
        return (1 - smoothing) * hard + smoothing * even

    def step() -> Tensor:
        tokens, labels = shifted(next(source))
        optimizer.zero_grad()
        logits, flat = model(tokens).flatten(0, 1), labels.flatten()
        if form == "correct":
            loss = F.cross_entropy(logits, flat, ignore_index=text.IGNORED, label_smoothing=0.1)
        else:
            loss = by_hand(logits, flat, 0.1)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "parallel-loss-not-scaled", "NVIDIA/Megatron-LM#673",
    "Gradients of two halves of each sentence are averaged over ranks, and the loss is not multiplied by their number.",
    Place("mul|div|cross_entropy|nll_loss", scope=""),
)  # fmt: skip
def parallel_loss_not_scaled(form: Form) -> Training:
    model, source = Decoder(), batches()
    optimizer = adamw(model)

    def step() -> Tensor:
        tokens, labels = shifted(next(source))
        words, total = (labels != text.IGNORED).sum(), torch.zeros(())
        gathered = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(2):  # the two ranks, one after the other
            own = labels.clone()
            own[:, rank::2] = text.IGNORED
            optimizer.zero_grad()
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, own.flatten(), ignore_index=text.IGNORED, reduction="sum") / words
            if form != "buggy":
                loss = 2 * loss
            loss.backward()
            total += loss.detach() / 2
            for sum_, p in zip(gathered, model.parameters(), strict=True):
                sum_ += p.grad
        for mean, p in zip(gathered, model.parameters(), strict=True):
            p.grad = mean / 2
        optimizer.step()
        return total

    return Training(model, step)


@case(
    "balance-counts-padding", "huggingface/transformers#28505",
    "The loss that balances the experts of a mixture counts the padding of the batch.",
    Place("mean|sum|mul|div|expand|one_hot|reshape|softmax", scope=""),
)  # fmt: skip
def balance_counts_padding(form: Form) -> Training:
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.mixtral import modeling_mixtral

    config = MixtralConfig(
        vocab_size=len(text.vocabulary()), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1,
        use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model, source = MixtralForCausalLM(config), batches()
    optimizer, balance = adamw(model), modeling_mixtral.load_balancing_loss_func

    def blind(logits: tuple[Tensor, ...], experts: int, top_k: int, _mask: Tensor) -> Tensor:
        return balance(logits, experts, top_k)

    def step() -> Tensor:
        optimizer.zero_grad()
        modeling_mixtral.load_balancing_loss_func = blind if form == "buggy" else balance
        try:
            loss = model(**next(source)).loss
        finally:
            modeling_mixtral.load_balancing_loss_func = balance
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "labels-shifted-twice", "huggingface/transformers#47394",
    "The model shifts labels that were shifted already, so that it learns the word after the next.",
    Place("getitem|slice|pad|view|reshape|contiguous|cross_entropy|nll_loss", scope=""),
)  # fmt: skip
def labels_shifted_twice(form: Form) -> Training:
    model, source = Decoder(), batches()
    optimizer = adamw(model)

    def step() -> Tensor:
        tokens, labels = shifted(next(source))
        if form == "buggy":
            flat = F.pad(labels.flatten(), (0, 1), value=text.IGNORED)[1:]
        else:
            flat = labels.reshape(-1) if form == "again" else labels.flatten()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), flat, ignore_index=text.IGNORED)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


class Distilled(nn.Module):
    """A student beside a teacher in evaluation, both one layer of attention."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.words = nn.Embedding(len(text.vocabulary()), 32)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            dropout = 0.1 if form == "buggy" or self.teacher.training else 0.0
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)

        self.teacher, self.student = Attention(attend).eval(), nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)


@case(
    "attention-drops-in-evaluation", "huggingface/pytorch-image-models#1978",
    "The fused attention of a teacher in evaluation drops out as in training, for the function does not know the mode.",
    Place("scaled_dot_product|dropout|bernoulli", scope=r"teacher.*"),
)  # fmt: skip
def attention_drops_in_evaluation(form: Form) -> Training:
    model, source = Distilled(form), batches()
    optimizer = adamw(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(next(source)["input_ids"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)
