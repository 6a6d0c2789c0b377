"""`trueup align --recipe`: what it prints, exit codes, align.json, the page, running the command again, and bad usage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.runs import pair, run
from trueup.analysis.recipes import following
from trueup.doors.cli import main

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def lines(out: str) -> list[str]:
    return [line.rstrip() for line in out.splitlines()]


def test_aligned(tmp_path: Path, capsys: Said) -> None:
    base, cand = pair(tmp_path, run(), run())
    assert main(["align", str(base), str(cand), "--recipe", "paddle", "--metric", "0.874", "0.872"]) == 0
    assert lines(capsys.readouterr().out) == [
        "environment    pass  3 switches, versions and seeds are the same",
        "inputs         pass  5 tensors that come into step 0: 5 bitwise equal",
        "forward        pass  6 tensors of 6 calls, all bitwise equal",
        "backward       pass  4 gradients of 4 calls, all bitwise equal",
        "                     gradients of weights were not recorded: level api records them",
        "several steps  pass  losses of 2 steps: on average 0 % apart, 0 absolute",
        "final metric   pass  0.874 and 0.872, 0.23 % apart",
        "",
        "ALIGNED by the numbers of recipe paddle: environment, inputs, forward, backward, several steps, final metric",
    ]


def test_deviates_with_the_way_down(tmp_path: Path, capsys: Said) -> None:
    base, cand = pair(tmp_path, run(level="api"), run("body.second", level="api"))
    json_file, folder = tmp_path / "a.json", tmp_path / "report"
    assert main(["align", str(base), str(cand), "--json", str(json_file), "-o", str(folder)]) == 1
    out = lines(capsys.readouterr().out)
    figures = "mean 0.398 and 0.478 (20 % apart), tensor 20 % off"
    assert out[2] == f"forward        DEVIATES     body.second, linear output.0: {figures}"
    assert out[3].strip().startswith("body.second, forward, step 0, rank 0: inputs are bitwise equal, outputs are not")
    assert [line.split()[:2] for line in out[5:10]] == [
        ["stem", "pass"], ["body", "DEVIATES"], ["first", "pass"], ["second", "DEVIATES"], ["linear#0", "DEVIATES"],
    ]  # fmt: skip
    assert "  after        guide, forward: in a single step the error is within 5 %, module by module" in out[12]
    assert "backward       not reached" in out
    at = "body.second, forward, step 0, rank 0 (torch.nn.functional.linear)"
    assert f"DEVIATES by recipe paddle, at: forward; it starts at {at}" in out
    document = json.loads(json_file.read_text())
    assert (document["schema"], document["schema_version"]) == ("trueup-align", 1)
    assert (document["verdict"], document["exit_code"]) == ("deviates", 1)
    assert [step["status"] for step in document["steps"]][:3] == ["pass", "pass", "DEVIATES"]
    assert document["steps"][2]["scope"] == "body.second"
    assert document["steps"][2]["rungs"][-1] == {
        "depth": 2, "name": "linear#0", "status": "DEVIATES", "said": figures,
    }  # fmt: skip
    assert document["comparison"]["schema"] == "trueup-verdict"
    page = (folder / "index.html").read_text()
    assert "Recipe paddle" in page
    assert "forward, from the top down" in page
    assert json.loads((folder / "align.json").read_text()) == document
    assert (folder / "verdict.json").exists()


def test_could_not_tell(tmp_path: Path, capsys: Said) -> None:
    base, cand = pair(tmp_path, run(losses=(2.0,)), run(losses=(2.0,)))
    assert main(["align", str(base), str(cand)]) == 2
    out = lines(capsys.readouterr().out)
    assert "several steps  could not tell  because only step 0 has a loss on both sides: record several, --steps 0:20" in out
    assert out[-1] == "COULD NOT TELL by recipe paddle, at: several steps"


def test_eight_ranks_against_one(tmp_path: Path, capsys: Said) -> None:
    base, cand = run().write(tmp_path / "base", world_size=8), run().write(tmp_path / "cand", world_size=1)
    assert main(["align", str(base), str(cand)]) == 2
    assert "trueup: The runs are of different sizes and cannot be aligned." in capsys.readouterr().err


def test_a_hostile_name_cannot_steer_the_terminal(tmp_path: Path, capsys: Said) -> None:
    sides = [run(level="api"), run("stem", level="api")]
    for side in sides:
        for row in side.rows:
            row["scope"] = row["scope"].replace("stem", "\x1b[2Jst<b>em")
    base, cand = pair(tmp_path, *sides)
    assert main(["align", str(base), str(cand), "-o", str(tmp_path / "report")]) == 1
    assert "\x1b[2J" not in capsys.readouterr().out
    assert "st<b>em" not in (tmp_path / "report" / "index.html").read_text()


class TestTheCallInside:
    """Captures of modules alone, and both commands: operators are recorded until the same call is named twice."""

    @pytest.fixture
    def coarse(self, tmp_path: Path) -> list[str]:
        return [str(path) for path in pair(tmp_path, run(), run("body.first"))]

    @staticmethod
    def recorded(monkeypatch: pytest.MonkeyPatch, places: Sequence[str], level: str = "api") -> list[tuple[Any, Sequence[str]]]:
        """Stand in for the runs; the candidate is wrong in these places, one after the other, then in the last of them."""
        ran: list[tuple[Any, Sequence[str]]] = []

        def execute(directory: Path, options: Any, command: Sequence[str], **_: Any) -> int:
            ran.append((options, command))
            place = places[min(len(ran) // 2, len(places)) - 1] if "--npu" in command else ""
            run(place, level=level).write(directory, world_size=1)
            return 0

        monkeypatch.setattr(following.launch, "execute", execute)
        return ran

    def follow(self, coarse: list[str]) -> int:
        return main(["align", *coarse, "--base-command", "python train.py --name 'a b'", "--", "python", "train.py", "--npu"])

    def test_is_named_twice(self, coarse: list[str], capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
        ran = self.recorded(monkeypatch, ["body.first"])
        assert self.follow(coarse) == 1
        assert [command for _, command in ran] == [["python", "train.py", "--name", "a b"], ["python", "train.py", "--npu"]] * 2
        assert {(one.levels, one.steps, one.stop, one.include) for one, _ in ran} == {(("module", "api"), ((0, 2),), True, ())}
        out = capsys.readouterr().out
        last = out.split("DEVIATES by recipe paddle, at: forward; it starts at body.first, forward, step 0, rank 0 (Linear)")[1]
        assert "linear#0" in last
        assert "verified: named by 2 of 2 pairs of runs" in last
        assert last.rstrip().splitlines()[-4].startswith(
            "DEVIATES by recipe paddle, at: forward; it starts at body.first, forward, step 0, rank 0 (torch.nn.functional.linear)"
        )

    def test_operators_that_tell_no_more(self, coarse: list[str], capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded(monkeypatch, ["body.first"], level="module")
        assert self.follow(coarse) == 1
        out = capsys.readouterr().out
        assert "no recorded operator is to blame for certain: it may be an autograd function or a hook (2 pairs of runs" in out
        assert out.count("it starts at body.first, forward, step 0, rank 0 (Linear)") == 2, "what was known before is kept"

    def test_a_call_that_is_not_named_every_time(self, coarse: list[str], capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
        ran = self.recorded(monkeypatch, ["body.first", "stem", "body.first"])
        assert self.follow(coarse) == 1
        out = capsys.readouterr().out
        assert len(ran) == 2 * 5, "three more on one side than on the other decide"
        assert "verified: named by 4 of 5 pairs of runs" in out
        assert "not every pair names this call: a sequential test decided (1 % risk)" in out

    def test_a_search_of_other_captures_is_kept(self, coarse: list[str], capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded(monkeypatch, ["body.first"])
        assert self.follow(coarse) == 1
        manifest = Path(coarse[1]) / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "run": "recorded anew"}))
        capsys.readouterr()
        assert self.follow(coarse) == 2
        said = capsys.readouterr().err
        assert "got:      the journal of a search with another capture\n" in said
        assert said.endswith(f"next:     remove {coarse[1]}-inside, which keeps that search, and give the same command again\n")

    def test_needs_the_baselines_command(self, coarse: list[str], capsys: Said) -> None:
        assert main(["align", *coarse, "--", "python", "train.py"]) == 2
        said = capsys.readouterr().err
        assert "trueup: The operators have to be recorded in the baseline, too.\n" in said
        assert f"give it, or record them where the baseline runs: trueup capture -o {coarse[0]}-inside --level module" in said

    def test_a_command_that_fails(self, coarse: list[str], capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(following.launch, "execute", lambda *_, **__: 3)
        assert main(["align", *coarse, "--base-command", "false", "--", "false"]) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert "cannot be judged: the baseline's command ended with exit code 3" in said
        assert "it starts at body.first, forward" in said
