"""The recogniser learns from real words, is the same model in both frameworks, and its broken operators are found."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import trueup
from end_to_end.executing import lines_of
from nursery import LIMIT, Nursery, nursery
from trueup.analysis.recipes import follow
from trueup.doors.cli import app

FOLDER = Path(__file__).parents[2] / "examples" / "text_recogniser"
SOURCE = str(Path(trueup.__file__).parents[1])
NEEDS_PADDLE = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddlepaddle is not installed")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


words = load("words")


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """What runs scripts with PaddlePaddle in it already."""
    with nursery() as started:
        started.load("paddle")
        yield started.python


def start(python: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a training in PaddlePaddle, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))}
    environment |= {"OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
    return subprocess.Popen(
        [python, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_words_are_real_and_kept_apart() -> None:
    train, unseen = words.vocabulary()
    assert len(train) > 1000
    assert {"module", "value", "class"} <= {*train, *unseen}
    assert not {*train} & {*unseen}
    assert all(3 <= len(word) <= words.LONGEST for word in (*train, *unseen))


def test_batches_repeat_with_their_seed_and_hold_the_whole_word() -> None:
    first, same, other = (next(words.batches(6, seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(first[name], same[name]) for name in first)
    assert not np.array_equal(first["image"], other["image"])
    longest = words.render("whichevers", np.random.default_rng(3))
    assert longest.shape == (words.HEIGHT, words.WIDTH)
    ink = (longest < longest.max() - 0.8).any(axis=0)
    assert not ink[[0, 1, -2, -1]].any(), "no letter is cut off"


def test_what_the_decoder_is_given_and_is_to_say() -> None:
    batch = words.collate(["abc"], np.random.default_rng(0))
    assert batch["letters"][0, :4].tolist() == [1, 2, 3, 0]
    assert batch["given"][0, :5].tolist() == [words.START, 1, 2, 3, words.END]
    assert batch["wanted"][0, :5].tolist() == [1, 2, 3, words.END, words.BLANK]
    assert words.read(np.array([[0, 1, 1, 0, 1, 2, 0]])) == ["aab"]


@pytest.mark.parametrize("neck", ["lstm", "transformer"])
def test_loss_falls_in_pytorch(neck: str, nursery: Nursery, tmp_path: Path) -> None:
    run = nursery.script(tmp_path / "log", FOLDER / "train_torch.py", "--steps", "6", "--batch-size", "4", "--neck", neck)
    assert (run.wait(), run.complained) == (0, "")
    losses = [float(line.split()[3]) for line in run.said.splitlines()]
    assert len(losses) == 6
    assert losses[-1] < 0.95 * losses[0]


def test_training_scripts_know_nothing_of_capture() -> None:
    assert not [name for name in ("train_paddle.py", "train_torch.py") if "capture" in (FOLDER / name).read_text()]


@NEEDS_PADDLE
def test_a_broken_operator_of_paddle_is_found(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the commands of examples/text_recogniser/README.md, as they are written there; a run ends after a step."""
    good, bad, aligned = lines_of(FOLDER / "README.md")
    other = bad.replace("runs/bad", "runs/order").replace("batch-norm-backward", "transposed-view-copy")
    assert other.count("order") == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(python).parent), prepend=os.pathsep)
    (tmp_path / "examples").symlink_to(FOLDER.parent)
    (tmp_path / "pyproject.toml").write_text('[tool.trueup.capture]\nsteps = "0:1"\nstop = true\n')
    runs = [start(python, "-m", "trueup", *shlex.split(line)) for line in (good, bad, other)]
    ended = [(*run.communicate(timeout=600), run.returncode) for run in runs]
    assert [end for end in ended if end[2]] == []
    assert ended[0][0] == ended[1][0], "a broken backward does not show in the first loss"
    assert app.run(shlex.split(aligned)) == 1
    told = {words[0]: words[1] for words in map(str.split, capsys.readouterr().out.splitlines()) if len(words) > 1}
    assert (told["forward"], told["backward"]) == ("pass", "DEVIATES")
    monkeypatch.chdir(tmp_path / "runs")
    backward, order = (trueup.compare("good", name).culprit for name in ("bad", "order"))
    assert (backward.scope, backward.phase, backward.op) == ("backbone.stage3.mix.bn", "backward", "paddle._C_ops.batch_norm")
    assert (order.scope, order.phase, order.op) == ("head.gtc_head.layer.self_attn", "forward", "paddle._C_ops.reshape")
    found = follow("good", "order").deviating
    assert (found.name, found.scope, found.rungs[-1].name) == ("forward", "head.gtc_head.layer.self_attn", "reshape#3")
    assert "the same mean" in found.rungs[-1].said, "which the guide's numbers would let pass"


SHAPES = """
import json, sys
sys.path.insert(0, sys.argv[1])
from recogniser_paddle import Recogniser
print(json.dumps({name: p.shape for name, p in Recogniser(sys.argv[2]).named_parameters() if p.trainable}))
"""


@NEEDS_PADDLE
def test_an_unknown_fault_is_refused(python: str) -> None:
    run = start(python, str(FOLDER / "train_paddle.py"), "--fault", "nothing")
    said, complained = run.communicate(timeout=LIMIT)
    assert (run.returncode, said) == (1, "")
    assert "fault 'nothing' is unknown: expected one of conv-padding-replicates-edge, batch-norm-backward" in complained


@NEEDS_PADDLE
def test_both_frameworks_have_the_same_modules(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.syspath_prepend(str(FOLDER))
    run = start(python, "-c", SHAPES, str(FOLDER), "lstm")
    paddle = json.loads(run.communicate(timeout=LIMIT)[0])
    torch = {name: list(p.shape) for name, p in load("recogniser_torch").Recogniser("lstm").named_parameters()}
    attention = "_attn."  # projections of query, key and value are one tensor in PyTorch
    alike = {name: sorted(shape) for name, shape in torch.items() if attention not in name}
    theirs = {name: sorted(shape) for name, shape in paddle.items() if attention not in name}
    assert alike == theirs
