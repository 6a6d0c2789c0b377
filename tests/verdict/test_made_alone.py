"""What one run alone makes and the next step reads: a state, a weight, a second step of the optimizer; ties; masks of two kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trueup
from verdict.captures import Recording, located, normal

Train = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return what trains a recurrent layer that carries its state from step to step, in some way, each once."""
    folder = tmp_path_factory.mktemp("carried")

    def train(how: str) -> Path:
        into = folder / how
        if not into.exists():
            torch.manual_seed(0)
            model, state = nn.GRU(6, 8), torch.zeros(1, 4, 8)
            optimizer, weight = torch.optim.SGD(model.parameters(), 1e-2), model.weight_hh_l0.data
            with trueup.capture(into, model=model):
                for _ in range(3):
                    optimizer.zero_grad()
                    made, state = model(torch.randn(5, 4, 6), state)
                    made.square().mean().backward()
                    optimizer.step()
                    state = state.detach()
                    if how == "permuted":
                        state = state[:, [1, 0, 2, 3]]
                    elif how == "copied":
                        state = state.clone()
                    elif how in ("half", "double"):
                        weight.copy_(getattr(weight, how)().float())
                    elif how == "twice":
                        optimizer.step()
        return into

    return train


@pytest.mark.parametrize("how", ["copied", "double"])
def test_what_one_run_alone_makes_and_agrees(trained: Train, how: str) -> None:
    result = trueup.compare(trained("plain"), trained(how))
    assert result.verdict == "aligned", result.sentence


@pytest.mark.parametrize(
    ("how", "phase", "said"),
    [
        ("permuted", "forward", "it reads what torch.Tensor.__getitem__ made, which only the candidate runs"),
        ("half", "forward", "it reads what torch.Tensor.copy_ made, which only the candidate runs"),
        ("twice", "optimizer", "the candidate steps the optimizer again without going backward in between"),
    ],
)
def test_what_one_run_alone_makes_and_the_next_step_reads(trained: Train, how: str, phase: str, said: str) -> None:
    """A weight rounded to float16 is off by 2e-4, within what 16-bit results elsewhere in the step may be off by."""
    result = trueup.compare(trained("plain"), trained(how))
    assert (result.verdict, result.culprit.phase, result.culprit.step) == ("deviates", phase, 1), result.sentence
    assert result.sentence.splitlines()[0] == f"DEVIATES  {said}"
    unread = [note for note in result.notes if "no recorded call reads" in note]
    assert all(note.startswith("1 call ") for note in unread)  # that of the last step


def test_a_tie_that_is_lost(tmp_path: Path) -> None:
    """Autograd adds up two gradients in the baseline; each of them agrees."""
    for lost in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 6), nn.Tanh(), nn.Linear(6, 10, bias=False))
        weight = model[0].weight
        model[2].weight = nn.Parameter(weight.detach().clone()) if lost else weight
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with trueup.capture(tmp_path / str(lost), model=model):
            tokens = torch.randint(0, 10, (12,))
            F.cross_entropy(model(tokens), tokens.roll(1)).backward()
            optimizer.step()
    result = trueup.compare(tmp_path / "False", tmp_path / "True")
    assert result.sentence.splitlines()[0] == (
        "DEVIATES  weight of 2 (Linear) is tied to 0.weight in the baseline, its own in the candidate"
    )


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.packed, self.out, self.fused = nn.Linear(8, 24), nn.Linear(8, 8), fused

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.view(2, 5, 2, 4).transpose(1, 2) for part in self.packed(x).chunk(3, -1))
        if self.fused:
            made = F.scaled_dot_product_attention(q, k, v, mask)
        else:
            made = torch.softmax(q @ k.transpose(-1, -2) / 2 + mask, -1) @ v
        return x + self.out(made.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Two layers that read one mask: of 0 and -Inf, or with a fused attention of bools."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.layers = fused, nn.ModuleList([Attention(fused), Attention(fused)])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(5) < lengths[:, None])[:, None, None]
        mask = mask if self.fused else torch.where(mask, torch.tensor(0.0), torch.tensor(-torch.inf))
        for layer in self.layers:
            x = layer(x, mask)
        return x


def test_a_mask_of_another_dtype_hides_no_weight(tmp_path: Path) -> None:
    """Of what a layer returns, which a weight inside makes another, its mask says nothing."""
    for name, fused in (("eager", False), ("fused", True), ("transposed", True)):
        torch.manual_seed(0)
        net = Net(fused)
        if name == "transposed":
            net.layers[1].out.weight.data.copy_(net.layers[1].out.weight.data.T.clone())
        with trueup.capture(tmp_path / name, model=net):
            net(torch.randn(2, 5, 8), torch.tensor([5, 3])).square().mean().backward()
    assert trueup.compare(tmp_path / "eager", tmp_path / "fused").verdict == "aligned"
    result = trueup.compare(tmp_path / "eager", tmp_path / "transposed")
    assert (result.verdict, result.culprit.scope, result.culprit.kind) == ("deviates", "layers.1.out", "input"), result.sentence


@pytest.mark.parametrize(("op", "kind"), [("aten::_log_softmax", "operator"), ("aten::unsqueeze", "argument")])
def test_an_axis_that_is_numbered_from_the_last_one(op: str, kind: str) -> None:
    """`unsqueeze` numbers the axes of its result, and -1 is another one than 1."""
    runs, x = (Recording(), Recording()), normal(4, 6)
    for run, dim in zip(runs, (1, -1), strict=True):
        made = np.float32(dim) * (x if kind == "operator" else x[:, None])
        run.call(op, [x], [made], arguments={"dim": dim, "half_to_float": False})
    assert [suspect.kind for suspect in located(*runs).suspects] == [kind]
