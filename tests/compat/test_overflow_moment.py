"""When a training is ended by ptdbg_ascend's check: with the backward pass, whoever updates the weights, and not for a mask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trueup_compat import ptdbg_ascend as ptdbg
from trueup_compat.ptdbg_ascend.switches import SCRIPT


class Masked(torch.nn.Module):
    """Masks with -Inf, which its softmax heals, and hands the masked scores out, too; large weights of its own overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Linear(4, 4)
        self.large = torch.nn.Parameter(torch.full((4,), 3e38))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        masked = self.score(x).masked_fill(torch.tensor([True, False, False, False]), float("-inf"))
        return torch.softmax(masked, -1), masked


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Masked]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Masked()
    ptdbg.set_dump_path("out")
    ptdbg.register_hook(model, ptdbg.overflow_check, overflow_nums=1)
    yield model
    SCRIPT.end()
    SCRIPT.path = None


def test_the_backward_pass_raises_where_no_optimizer_of_pytorch_steps(checked: Masked) -> None:
    weights = checked.score.weight.detach().clone()
    done = 0
    with pytest.raises(ValueError, match=r"^\[overflow 1 times\]: dump file is saved in 'out/.*_1\.pkl'\.$"):
        for k in range(4):
            share, _ = checked(torch.ones(2, 4))
            loss = (share * checked.large * 4).sum() if k == 2 else share.pow(2).sum()
            loss.backward()
            done += 1
            with torch.no_grad():
                checked.score.weight -= 0.1 * checked.score.weight.grad
    assert done == 2
    assert torch.isfinite(checked.score.weight).all()
    assert not torch.equal(weights, checked.score.weight)


def test_an_evaluation_is_ended_before_its_next_forward(checked: Masked, capsys: pytest.CaptureFixture[str]) -> None:
    done = 0
    with torch.no_grad(), pytest.raises(ValueError, match=r"^\[overflow 1 times\]"):
        for k in range(4):
            _, masked = checked(torch.ones(2, 4))
            torch.softmax(masked, -1)
            _ = checked.large * 4 if k == 1 else None
            done += 1
    assert done == 2
    assert "module name :'Tensor_mul_0_forward' is overflow" in capsys.readouterr().out


def test_a_scaler_that_skips_steps_does_what_it_is_there_for(checked: Masked) -> None:
    optimizer = torch.optim.SGD(checked.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    skipped = 0
    for _ in range(3):
        optimizer.zero_grad()
        share, _ = checked(torch.ones(2, 4))
        scaler.scale((share * 100).sum()).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    assert skipped == 3


def test_what_overflows_is_in_the_file_even_if_it_is_a_single_number(checked: Masked) -> None:
    with pytest.raises(ValueError, match=r"^\[overflow 1 times\]"):
        share, _ = checked(torch.ones(2, 4))
        (share.sum() * 3e38 * 1e5).backward()
    (file,) = Path("out").glob("**/Overflow_info_*.pkl")
    rows = [json.loads(line)[0] for line in file.read_text("utf-8").splitlines()]
    assert rows == [f"Tensor_mul_0_forward_{what}" for what in ("input.0", "output.0", "stack_info")]
    assert len(list(file.with_suffix("").glob("*.npy"))) == 2
