"""Random numbers that differ: another seed, a draw that one side lacks. No call is wrong; where the state begins to differ is said.

msprobe has no states: it flags the dropout, and attention that drops out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trueup

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


def record(path: Path, detail: str, *, seed: int = 7, extra: str = "", training: bool = True) -> Path:
    """Train a BERT with dropout for two steps; ``extra`` says where a number is drawn more."""
    torch.manual_seed(0)
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=50, num_hidden_layers=2, max_position_embeddings=16, **SIZES)
    model = BertForSequenceClassification(config).train(training)
    ids, labels = torch.randint(0, 50, (3, 8)), torch.tensor([0, 1, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if extra == "module":
        model.bert.encoder.layer[1].register_forward_pre_hook(lambda *_: [torch.rand(3), None][1])
    torch.manual_seed(seed)
    with trueup.capture(path, model=model, level=["module", "api"], detail=detail) as capture:
        for step in range(2):
            if extra == "loop" and step:
                torch.randn(2)
            optimizer.zero_grad()
            model(ids, labels=labels).loss.backward()
            optimizer.step()
            capture.step()
    return path


@pytest.fixture(scope="module", params=["stats", "tensor"])
def detail(request: pytest.FixtureRequest) -> str:
    torch.set_num_threads(1)
    return str(request.param)


@pytest.fixture(scope="module")
def plain(detail: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("plain") / "run", detail)


def test_another_seed(plain: Path, detail: str, tmp_path: Path) -> None:
    result = trueup.compare(plain, record(tmp_path / "run", detail, seed=8))
    first = result.culprit
    assert first is not None
    assert (first.kind, first.op, first.scope) == ("random", "torch.nn.functional.dropout", "bert.embeddings.dropout")
    assert len(result.culprits) == 1
    if detail == "tensor":
        assert first.because == (
            "the state of the generator (cpu) is another one when step 0 begins: "
            "the difference begins in the random state, not in the call"
        )


@pytest.mark.parametrize(("extra", "step", "op"), [("module", 0, ATTENTION), ("loop", 1, "torch.nn.functional.dropout")])
def test_one_more_draw(plain: Path, detail: str, tmp_path: Path, extra: str, step: int, op: str) -> None:
    """Attention draws among other things: it is not what is wrong."""
    result = trueup.compare(plain, record(tmp_path / "run", detail, extra=extra))
    first = result.culprit
    assert first is not None
    assert (first.kind, first.op, first.step) == ("random", op, step)
    assert len(result.culprits) == 1
    drawn = {"module": "torch.rand (bert.encoder.layer.1)", "loop": "torch.randn"}[extra]
    assert f"{drawn}, which only the candidate has, drew" in result.sentence
    assert ("the difference begins in the random state, not in the call" in result.sentence) == (detail == "tensor")


def test_a_state_that_nobody_draws_from_is_a_note(detail: str, tmp_path: Path) -> None:
    sides = [record(tmp_path / str(seed), detail, seed=seed, training=False) for seed in (7, 8)]
    result = trueup.compare(*sides)
    assert result.verdict == "aligned"
    told = [note for note in result.notes if "the state of the random generator (cpu) is another one from step 0 on" in note]
    assert len(told) == (detail == "tensor")
