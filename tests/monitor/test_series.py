"""Series of a monitor: written, read, gone on with, damaged; two of them lined up."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import trueup
from trueup.analysis.invariants.relations import learn
from trueup.analysis.monitor.comparing import compare_series
from trueup.analysis.monitor.kinds import Joined
from trueup.doors.cli import main
from trueup.foundation.model import TrueupError
from trueup.foundation.store import series as writing
from trueup.foundation.store.durable import write_json
from trueup.foundation.store.series import SeriesReader, SeriesWriter

ROOT = {"monitor": {}}
NAMES = ("loss", "gradient_norm/a", "gradient_norm/b")


def write(path: Path, values: np.ndarray, *, rank: int = 0, world: int = 1, names: tuple[str, ...] = NAMES, start: int = 0) -> Path:
    writer = SeriesWriter(path, rank, ROOT, {"world_size": world})
    for step, row in enumerate(values, start):
        writer.append(step, [(names, row)])
    writer.close("complete")
    return path


def healthy(seed: int = 0, steps: int = 300) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.exp(0.05 * random.standard_normal((steps, 3)) - np.linspace(0, 1, steps)[:, None])


def test_round_trip(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path, 0, ROOT, {})
    names = ("loss", "other")
    writer.append(0, [(names, np.array([1.5, math.nan]))])
    writer.append(1, [(("loss",), np.array([math.inf]))])
    writer.flush()
    writer.append(2, [(("late/x",), np.array([3.0]))])
    writer.close("complete")
    read = SeriesReader(tmp_path)
    assert (read.problems, read.ranks, read.names(0)) == ([], [0], ["loss", "other", "late/x"])
    assert read.column(0, "loss").tolist()[:2] == [1.5, math.inf]
    assert math.isnan(read.column(0, "loss")[2])
    other = read.column(0, "other")
    assert (other[0], math.isnan(other[1])) == (math.inf, True)  # a NaN that was taken, and nothing


def test_files_take_a_share_of_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, cpu=0.0)
    monkeypatch.setattr(writing, "time", SimpleNamespace(
        time=lambda: clock.now, monotonic=lambda: clock.now, process_time=lambda: clock.cpu, thread_time=lambda: clock.cpu,
    ))  # fmt: skip
    writer = SeriesWriter(tmp_path, 0, ROOT, {})

    def files(now: float, cpu: float) -> int:
        clock.now, clock.cpu = now, cpu
        writer.append(int(now), [(("loss",), np.array([1.0]))])
        writer._finish_writing()
        writer._took = 0.01  # 1,000 times that are 10 s
        return len(list(tmp_path.glob("rank-00000/series-*.parquet")))

    assert files(0.5, 0.1) == 0
    assert files(1.5, 0.2) == 1  # a second
    assert files(9.0, 2.0) == 1  # seconds went by, but others had the processor
    assert files(10.0, 10.5) == 2
    assert files(69.0, 12.0) == 2
    assert files(70.5, 12.0) == 3  # a minute
    writer.close("complete")


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {"format_version": 1})
    with pytest.raises(TrueupError, match="a capture of calls"):
        SeriesWriter(tmp_path, 0, ROOT, {})
    held = write(tmp_path / "m", healthy())
    write_json(held / "rank-00000/lock", {"pid": os.getppid(), "host": os.uname().nodename})
    with pytest.raises(TrueupError, match=f"process {os.getppid()} writes it now"):
        SeriesWriter(held, 0, ROOT, {})
    assert trueup.compare(held, held).verdict == "aligned"
    with pytest.raises(TrueupError, match="no calls"):
        learn([held])


def test_damage_is_named(tmp_path: Path) -> None:
    for _ in range(3):
        write(tmp_path, healthy(steps=20))
    files = sorted((tmp_path / "rank-00000").glob("series-*"))
    files[0].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-40])
    read = SeriesReader(tmp_path)
    assert len(read.problems) == 2
    assert "series-0000.parquet is missing" in read.problems[0]
    assert "series-0002.parquet is damaged" in read.problems[1]
    assert len(read.steps(0)) == 20


def test_aligned(tmp_path: Path) -> None:
    base = write(tmp_path / "a", healthy())
    found = compare_series(base, write(tmp_path / "b", healthy()))
    assert (found.verdict, found.exit_code, found.differing) == ("aligned", 0, 0)
    assert found.sentence == "ALIGNED  the same number at each step in 3 series over 300 steps (0 to 299)"
    near = compare_series(base, write(tmp_path / "c", healthy() * (1 + 1e-4)))
    assert (near.verdict, near.differing, near.left) == ("aligned", 3, ())
    other_seed = compare_series(base, write(tmp_path / "d", healthy(7)))
    assert other_seed.verdict == "aligned"  # as noisy as itself, which is all that one run tells


def test_what_was_clipped_now_and_then_has_the_noise_of_those_steps(tmp_path: Path) -> None:
    def clipped(seed: int, by: float = 1.0) -> np.ndarray:
        values = np.minimum(1.0, by * (1.3 + 0.3 * np.random.default_rng(seed).standard_normal((60, 1))))
        return np.concatenate([values, np.where(np.arange(60) < 30, 1e-3, 1e-4 * by)[:, None]], axis=1)

    names = ("clip_ratio", "lr/0")
    base = write(tmp_path / "a", clipped(0), names=names)
    assert (clipped(0)[:, 0] == 1).mean() > 0.7
    assert compare_series(base, write(tmp_path / "b", clipped(1), names=names)).verdict == "aligned"
    left = compare_series(base, write(tmp_path / "c", clipped(1, 0.5), names=names)).left
    assert [(one.series, one.beyond) for one in left] == [("lr/0", 30)]  # which is set: its noise is none


def wandering(seed: int, batches: int, steps: int = 300, every: int = 60) -> np.ndarray:
    """A loss, and many series that wander: noise of the batches, and slow moves of the run's own, of every size."""
    random, common = np.random.default_rng(seed), np.random.default_rng(batches)
    noise = 0.2 * common.standard_normal((steps, every + 1))
    slow = np.cumsum(random.standard_normal((steps, every)), axis=0) * np.geomspace(1e-4, 3e-2, every)
    return np.exp(noise + np.column_stack([np.zeros(steps), slow]) - np.linspace(0, 1, steps)[:, None])


def test_runs_that_wander_apart_are_healthy_and_shared_batches_show_a_small_fault(tmp_path: Path) -> None:
    names = ("loss", *(f"gradient_norm/{k}" for k in range(60)))
    base = write(tmp_path / "a", wandering(1, 1), names=names)
    found = compare_series(base, write(tmp_path / "b", wandering(2, 2), names=names))
    assert (found.verdict, found.left) == ("aligned", ())
    assert "the runs saw other batches" in found.notes[-1]
    same = wandering(3, 1)
    healthy_pair = compare_series(base, write(tmp_path / "c", same, names=names))
    assert (healthy_pair.verdict, healthy_pair.notes) == ("aligned", ())
    same[:, 5] *= 0.9  # one layer's gradient, from the first step on
    found = compare_series(base, write(tmp_path / "d", same, names=names))
    assert [one.series for one in found.left] == ["gradient_norm/4"]
    assert "10 % lower; up to 2" in found.sentence


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ({40: 1, 41: 1, 43: 1, 90: 2}, "aligned"),  # three single zeros of 32,768 elements: what counting scatters
        ({step: 200 + step % 3 for step in range(200)}, "deviates"),
        (dict.fromkeys(range(200), 8192), "deviates"),  # a quarter, at once: the steps between shares tell no count
    ],
)
def test_shares_of_few_elements_have_the_noise_of_counting(tmp_path: Path, counts: dict[int, int], verdict: str) -> None:
    loss, none, some = healthy()[:200, 0], np.zeros(200), np.zeros(200)
    some[list(counts)] = np.array([*counts.values()]) / 32768
    names = ("loss", "activation_zeros/a")
    for name, zeros in (("a", none), ("b", some)):
        write(tmp_path / name, np.stack([loss, zeros], 1), names=names)
    found = compare_series(tmp_path / "a", tmp_path / "b")
    assert found.verdict == verdict, found.sentence


def test_what_is_set_has_no_noise_and_what_cannot_be_is_not_missing(tmp_path: Path) -> None:
    rate = np.linspace(1e-3, 0, 60)[:, None]
    base = write(tmp_path / "a", np.column_stack([healthy(0, 60)[:, :1], rate]), names=("loss", "lr/1"))
    other = np.column_stack([healthy(0, 60)[:, :1], rate * 1.01, np.zeros(60)])
    cand = write(tmp_path / "b", other, names=("loss", "lr/1", "activation_saturated/a"))
    found = compare_series(base, cand)
    assert found.sentence.startswith("DEVIATES  lr of group 1 leaves first, at step 0\n")
    assert "1 % higher; it is set and has no noise" in found.sentence
    assert found.notes == ()  # float32 has no end to saturate at


def test_the_first_series_that_leaves_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, worse = write(tmp_path / "a", healthy()), healthy()
    worse[100:, 2] *= 3
    worse[140:, 1] *= 3
    worse[200:, 0] *= 2
    cand = write(tmp_path / "b", worse)
    assert main(["compare", str(base), str(cand), "--json", str(tmp_path / "found.json")]) == 1
    said = capsys.readouterr().out
    assert said.startswith("DEVIATES  gradient_norm of b leaves first, at step 100\n")
    assert "the loss leaves at step 200" in said
    assert "gradient_norm/a" in said
    assert '"trueup-series"' in (tmp_path / "found.json").read_text()
    worse[50, 1] = math.nan  # a single bad step is an outlier; three in five are not
    assert compare_series(base, write(tmp_path / "c", worse)).left[0].beyond == 100
    worse[50:53, 1] = math.nan
    first = compare_series(base, write(tmp_path / "d", worse)).left[0]
    assert (first.series, first.beyond) == ("gradient_norm/a", 50)


def test_what_cannot_be_told(tmp_path: Path) -> None:
    base = write(tmp_path / "a", healthy())
    short = compare_series(write(tmp_path / "s", healthy(steps=10)), write(tmp_path / "t", healthy(1, 10)))
    assert (short.verdict, short.exit_code) == ("inconclusive", 2)
    assert "too few" in short.notes[-1]
    fewer = compare_series(base, write(tmp_path / "b", healthy()[:, :2], names=NAMES[:2]))
    assert (fewer.verdict, fewer.sentence.splitlines()[0][:14]) == ("inconclusive", "COULD NOT TELL")
    assert "only " in fewer.notes[0]
    ended = compare_series(base, write(tmp_path / "c", healthy()[:200]))
    assert ended.verdict == "inconclusive"
    two, one = tmp_path / "two", write(tmp_path / "one", healthy(), world=2)
    for rank in range(2):
        write(two, healthy(), rank=rank, world=2)
    assert f"ranks 1 are only in {two} and were not compared" in compare_series(one, two).notes
    assert f"{one} holds 1 of 2 ranks: they tell nothing of all" in compare_series(base, one).notes
    assert compare_series(base, one).exit_code == 2
    with pytest.raises(TrueupError, match="no step in common"):
        compare_series(base, write(tmp_path / "late", healthy(), start=500))


def test_curves_read_a_monitor(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    found = trueup.curves([write(tmp_path / "a", healthy())], [write(tmp_path / "b", healthy())], "gradient_norm/b")
    assert found.word == "equivalent"


def ranks(path: Path, count: int, seed: int = 0, *, odd: float = 1.0, factor: float = 1.0) -> Path:
    """Write a run on some ranks, each with its share of the tokens and its own noise; ``odd``: a factor of the last rank."""
    names = ("loss", "tokens", "activation_max/a", "digest/a")
    for rank in range(count):
        values = healthy(seed + 7 * rank, 200) * (odd if rank == count - 1 else 1.0)
        values[:, 2] *= factor
        rows = np.column_stack([values[:, 0], np.full(200, 12 / count), values[:, 2], values[:, 1]])
        write(path, rows, rank=rank, world=count, names=names)
    return path


def test_ranks_are_joined_where_the_runs_have_other_numbers_of_them(tmp_path: Path) -> None:
    two, three = ranks(tmp_path / "2", 2), ranks(tmp_path / "3", 3)
    held = Joined(SeriesReader(three))
    alone = [SeriesReader(three).column(rank, "activation_max/a") for rank in range(3)]
    assert held.column(0, "activation_max/a").tolist() == np.max(alone, axis=0).tolist()
    assert (held.names(0), held.column(0, "tokens").tolist()) == (["loss", "tokens", "activation_max/a"], [12.0] * 200)
    found = trueup.compare(two, three)
    assert (found.verdict, found.exit_code) == ("aligned", 0)
    assert "2 and 3 ranks: each series is joined over the ranks (mean, largest or sum), digests are left out" in found.notes
    left = trueup.compare(two, ranks(tmp_path / "c", 3, factor=2.0))
    assert left.sentence.startswith("DEVIATES  activation_max of a leaves first, at step 0")


def test_show_names_the_odd_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    ranks(Path("m"), 3, odd=4.0)
    assert main(["show", "m", "--scope", "loss", "--json", "found.json"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("m  unknown framework, 3 ranks, 200 steps (0 to 199), 1 series of a monitor")
    row = json.loads(Path("found.json").read_text())["series"][0]
    assert (row["series"], row["taken"], row["odd"]) == ("loss", 200, 2)
    assert 2 < row["apart"] < 5
    assert main(["show", "m", "--op", "linear"]) == 64
    assert "--op is for captures of calls" in capsys.readouterr().err


def test_show_reads_a_series_that_became_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = healthy(steps=30)
    values[7:, 0], values[9, 1] = math.nan, math.inf
    assert main(["show", str(write(tmp_path / "m", values)), "--scope", "*"]) == 0
    said = capsys.readouterr().out
    assert "inf" in said
    assert "gradient_norm/b" in said


def begun_alike(seed: int, masks: float = 0.0, steps: int = 120) -> np.ndarray:
    """Two runs of a chaotic training: rounding grows to a third of everything in 60 steps. ``masks``: of dropout of its own."""
    random, common = np.random.default_rng(seed), np.random.default_rng(0)
    shared = np.exp(0.2 * common.standard_normal((steps, len(ALIKE))) - np.linspace(0, 1, steps)[:, None])
    grown = np.minimum(1e-7 * np.exp(np.arange(steps) / 4), 0.3)[:, None] * random.standard_normal((steps, len(ALIKE)))
    drawn = masks * random.standard_normal((steps, len(ALIKE))) * (np.arange(len(ALIKE)) > 1)
    return np.asarray(shared * np.exp(grown + drawn))


ALIKE = (
    "activation_rms/in", "activation_max/in", "activation_rms/out", "activation_max/out", "loss", "gradient_norm",
    "gradient_norm/in", "gradient_norm/out", "update_ratio/out",
)  # fmt: skip


def spiky(path: Path, seed: int, spike: float, worse: float = 1.0) -> Path:
    """Write 400 steps of a layer under Adam: its gradient, ``spike`` times as large in step 150, and the mean of its squares, from
    step 250 on ``worse`` times as large."""
    random = np.random.default_rng(seed)
    gradients = np.exp(0.3 * random.standard_normal(400))
    gradients[150] *= spike
    squares = gradients**2
    mean = np.zeros(400)
    for step in range(400):
        mean[step] = 0.999 * mean[step - 1] + 0.001 * squares[step] if step else squares[0]
    mean[250:] *= worse
    losses = np.exp(0.05 * random.standard_normal(400))
    columns = [losses, gradients, mean, 0.1 / np.sqrt(mean)]
    names = ("loss", "gradient_norm/a", "variance_norm/a", "momentum_to_variance/a")
    return write(path, np.stack(columns, axis=1), names=names)


def test_second_moments_remember_a_spike(tmp_path: Path) -> None:
    plain, spike = spiky(tmp_path / "plain", 1, 1.0), spiky(tmp_path / "spike", 2, 40.0)
    told = compare_series(plain, spike)
    assert told.verdict == "aligned", told.sentence
    far = compare_series(plain, spiky(tmp_path / "worse", 2, 1.0, worse=40.0))
    assert (far.verdict, far.left[0].series, far.left[0].beyond) == ("deviates", "variance_norm/a", 250)


def test_what_is_set_otherwise_is_named_whatever_the_seed(tmp_path: Path) -> None:
    def run(name: str, seed: int, decay: float, eps: float, clip: float | None = None) -> Path:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8, eps=eps), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=decay)
        with trueup.monitor(model, optimizer, tmp_path / name, alerts=False):
            for _ in range(22):
                model(torch.randn(8, 4)).square().mean().backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        return tmp_path / name

    base = run("base", 1, 0.1, 1e-5, 1.0)
    assert not compare_series(base, run("healthy", 2, 0.1, 1e-5, 1.0)).left
    both = compare_series(base, run("both", 2, 0.0, 1e-3, 0.5))
    assert [one.series for one in both.left if one.series.startswith("setting/")] == [
        "setting/AdamW weight_decay", "setting/AdamW clipping", "setting/eps of 1 (LayerNorm)",
    ]  # fmt: skip
    assert both.sentence.splitlines()[:2] == [
        "DEVIATES  AdamW weight_decay is set otherwise, from step 0",
        "          0.100000 in the baseline, 0 in the candidate: 100 % lower; it is set and has no noise",
    ]
    by_hand = compare_series(base, run("by-hand", 2, 0.1, 1e-5))  # who clips by hand says of no setting
    assert (by_hand.verdict, by_hand.left) == ("inconclusive", ())


@pytest.mark.parametrize(("series", "factor"), [
    ("gradient_norm/in", 0.9), ("loss", 0.94), ("activation_rms/out", 0.95), ("update_ratio/out", 1.05), ("", 1.0),
])  # fmt: skip
@pytest.mark.parametrize("masks", [0.0, 0.05])
def test_runs_that_begin_alike_show_in_their_first_steps_what_chaos_hides_later(
    tmp_path: Path, series: str, factor: float, masks: float
) -> None:
    base = write(tmp_path / "a", begun_alike(1, masks), names=ALIKE)
    values = begun_alike(2, masks)
    if series:
        values[:, ALIKE.index(series)] *= factor
    found = compare_series(base, write(tmp_path / "b", values, names=ALIKE))
    assert [(one.series, one.beyond) for one in found.left] == ([(series, 0)] if series and not masks else [])
    other = begun_alike(2)
    other[:, :2] *= 1.02  # not the same first batch
    other[:, 6] *= 0.9
    assert compare_series(base, write(tmp_path / "c", other, names=ALIKE)).left == ()


def test_the_first_layer_is_one_with_none_inside(tmp_path: Path) -> None:
    names = ("activation_rms/net", "activation_max/net", "activation_rms/net.in", "activation_max/net.in", *ALIKE[2:])
    base, cand = (np.column_stack([begun_alike(seed)[:, :2], begun_alike(seed)]) for seed in (1, 2))
    cand[:, 0] *= 0.95  # the whole net ends with a dropout that is off
    found = compare_series(write(tmp_path / "a", base, names=names), write(tmp_path / "b", cand, names=names))
    assert [(one.series, one.beyond) for one in found.left] == [("activation_rms/net", 0)]


def test_repeats_of_the_baseline_are_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, cand, again = (begun_alike(seed) for seed in (1, 2, 3))
    cand[:, ALIKE.index("gradient_norm/in")] *= 0.9
    paths = [str(write(tmp_path / name, values, names=ALIKE)) for name, values in (("a", base), ("b", cand), ("c", again))]
    assert main(["compare", *paths[:2], "--repeat", paths[2]]) == 1
    assert "1 repeat of the baseline: differences of that size count as noise" in " ".join(capsys.readouterr().out.split())
    again[:, ALIKE.index("gradient_norm/in")] *= 1.15  # as far, on the other side
    loose = str(write(tmp_path / "d", again, names=ALIKE))
    assert main(["compare", *paths[:2], "--repeat", paths[2], loose]) == 0
    assert trueup.compare(*paths[:2], repeat=[loose]).exit_code == 0
    short = write(tmp_path / "e", again[:50], names=ALIKE)
    with pytest.raises(TrueupError, match="got:      1 rank, 50 steps"):
        compare_series(*paths[:2], [short])


def test_of_what_leaves_in_one_step_the_cause_comes_first(tmp_path: Path) -> None:
    names = (*ALIKE, "lr/0")
    base, cand = (np.column_stack([begun_alike(seed), np.full(120, 1e-3)]) for seed in (1, 2))
    cand[:, names.index("gradient_norm/in")] *= 0.97  # clipping passes on what one layer has
    cand[:, names.index("gradient_norm/out")] *= 0.9
    write(tmp_path / "a", base, names=names)
    left = compare_series(tmp_path / "a", write(tmp_path / "b", cand, names=names)).left
    assert [one.series for one in left] == ["gradient_norm/out", "gradient_norm/in"]
    cand[:, -1] *= 1.02
    left = compare_series(tmp_path / "a", write(tmp_path / "c", cand, names=names)).left
    assert left[0].series == "lr/0"
