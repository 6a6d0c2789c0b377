"""Models of text: three of `transformers` with random weights, and the LSTM tagger."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import text
from zoo.tagger import Tagger
from zoo.training import Batch, Training, on

WIDTH, HEADS, LAYERS = 96, 4, 2
INNER = 640  # the second matrix product of a feed-forward block sums over more than 512 terms
COUNT, SIZE = 4, 4  # batches, sentences in each


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss a model of `transformers` computes itself; it ignores labels of -100."""
    return model(**batch).loss


def tagging_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=text.IGNORED)


def padded(tokens: list[list[int]], labels: list[list[int]]) -> Batch:
    """Return what models of `transformers` take: padding is masked in attention and ignored in the loss."""
    input_ids = text.padded(tokens, text.PAD)
    mask = (input_ids != text.PAD).long()
    return {"input_ids": input_ids, "attention_mask": mask, "labels": text.padded(labels, text.IGNORED)}


def punctuation() -> list[Batch]:
    """Return batches for BERT: [CLS] and the words; labels are the punctuation mark after each word."""
    return [
        padded([[text.CLS, *text.ids(one)] for one in some], [[text.IGNORED, *one.mark] for one in some])
        for some in text.batches(COUNT, SIZE)
    ]


def next_word() -> list[Batch]:
    """Return batches for a causal model; the model itself shifts the labels by one."""
    rows = [[text.ids(one) for one in some] for some in text.batches(COUNT, SIZE)]
    return [padded(tokens, tokens) for tokens in rows]


def capitals() -> list[Batch]:
    """Return batches for the tagger; labels say how each word was written."""
    return [
        {
            "tokens": text.padded(map(text.ids, sentences), text.PAD),
            "labels": text.padded([sentence.case for sentence in sentences], text.IGNORED),
        }
        for sentences in text.batches(COUNT, 2 * SIZE)
    ]


def bert(device: str, attention: str = "eager") -> Training:
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(
        vocab_size=len(text.vocabulary()),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=64,
        num_labels=len(text.MARKS),
        attn_implementation=attention,
    )
    model = BertForTokenClassification(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=False)
    return Training(model, optimizer, own_loss, on(device, punctuation()), clip=1.0)


def gpt2(device: str, attention: str = "sdpa") -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(text.vocabulary()),
        n_positions=64,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=INNER,
        bos_token_id=text.CLS,
        eos_token_id=text.CLS,
        use_cache=False,
        attn_implementation=attention,
    )
    model = GPT2LMHeadModel(config).to(device).train()
    model.loss_type = "ForCausalLM"  # transformers 4.57 derives it from the class's name, fails at "LMHead" and warns
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    return Training(model, optimizer, own_loss, on(device, next_word()))


def llama(device: str, attention: str = "sdpa") -> Training:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(text.vocabulary()),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=64,
        bos_token_id=text.CLS,
        eos_token_id=text.CLS,
        use_cache=False,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    return Training(model, optimizer, own_loss, on(device, next_word()), clip=1.0)


def lstm_tagger(device: str) -> Training:
    model = Tagger(len(text.vocabulary()), len(text.CASES)).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)
    return Training(model, optimizer, tagging_loss, on(device, capitals()), clip=5.0)
