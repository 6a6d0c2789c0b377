"""What each command prints and returns, on two small runs of which one has a wrong backward."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from trueup.doors.report.slot_pairs import VECTOR_COLUMNS

from .conftest import MakeShell, seq_of


def test_vcs_lists_what_points_elsewhere_in_order_of_execution(shell: MakeShell, runs: Path) -> None:
    code, text = shell(runs / "base", runs / "cand")("vcs -c 0.98 -l 2")
    assert code == 1
    panels = re.findall(r"^╭─ (\d)  (.*?)  (\w+), step (\d)", text, re.MULTILINE)
    assert [number for number, *_ in panels] == ["1", "2"]
    assert (panels[0][1].endswith("Clipped.apply#0"), *panels[0][2:]) == (True, "backward", "0")
    assert re.search(r"│ input   grad_output\.0 (1|0\.999999)", text)
    assert re.search(r"│ output  grad_input\.0 -?0\.\d{6}  max \|d\| \d", text)
    said = r"^\d+ calls with an output whose cosine is 0\.98 or less, of \d+ compared calls, \d+ more below"
    assert re.search(said, text, re.MULTILINE)
    assert "vc says  DEVIATES  first culprit:" in text
    assert "≈" not in text


def test_vcs_of_statistics_estimates_and_says_what_tensors_would_show(shell: MakeShell, runs: Path) -> None:
    code, text = shell(runs / "base-stats", runs / "cand-stats")("vcs -c 0.98 -l 1")
    assert code == 1
    assert re.search(r"output  grad_input\.0 ≈-?0\.\d{6}", text)
    assert "≈ estimated from sketches" in text
    assert "record both runs with --detail tensor" in " ".join(text.split())


def test_vcs_of_equal_runs_is_quiet(shell: MakeShell, runs: Path) -> None:
    code, text = shell(runs / "base", runs / "base")("vcs")
    assert code == 0
    assert text.startswith("no output with a cosine of 0.98 or less, of")
    assert "vc says  ALIGNED" in text


def test_a_document_s_dashes_and_quotes_are_read(shell: MakeShell, runs: Path) -> None:
    run = shell(runs / "base", runs / "cand")
    assert run("vcs –c 0.98 –l 1")[1].count("╭") == 1
    assert "comparison" in run("ac –c")[1]


def test_vc_is_compare_and_leaves_the_table(shell: MakeShell, runs: Path, tmp_path: Path) -> None:
    run = shell(runs / "base", runs / "cand")
    code, text = run(f"vc -o {tmp_path / 'out'}")
    assert code == 1
    assert text.startswith("DEVIATES  first culprit:")
    assert (tmp_path / "out" / "index.html").exists()
    (table,) = (tmp_path / "out").glob("result_*.csv")
    lines = table.read_text().splitlines()
    assert lines[0] == ",".join(VECTOR_COLUMNS)
    assert sum(",1.0,0.0,0.0,0.0,0.0," in line for line in lines) > 10
    code, again = run(f"vcs -f {table} -c 0.98 -l 1")
    own = run("vcs -c 0.98 -l 1")[1]
    said = r"^(\d+) calls with an output whose cosine is 0\.98 or less"
    assert code == 1
    assert re.findall(said, again, re.MULTILINE) == re.findall(said, own, re.MULTILINE)


def test_vc_takes_other_captures(shell: MakeShell, runs: Path) -> None:
    run = shell(runs / "base")
    assert "nothing to compare with" in run.fails("vc")
    assert run(f"vc -lt {runs / 'cand'} -g api")[0] == 1
    assert run(f"vc -lt {runs / 'base'}")[0] == 0
    assert "aten" in run.fails("vc -g atem")


def test_ac_checks_everything(shell: MakeShell, runs: Path) -> None:
    run = shell(runs / "base", runs / "cand")
    code, text = run("ac")
    assert code == 1  # the broken backward is another operator
    heads = [line.split(" ")[0] for line in text.splitlines() if line[:1].isalpha()]
    assert heads[:4] == ["comparison", "fusion", "overflow,", "overflow,"]
    assert {"casts", "precision", "dtypes", "graph"} <= set(heads)
    assert "not made yet: `ac -c`, or `vc`" in text
    assert "trueup triage" in text
    code, text = run("ac -c")
    assert code == 1
    assert "DEVIATES  first culprit:" in text
    assert run("ac")[0] == 1  # what was compared is kept


def test_ls_counts_types_and_lists_calls(shell: MakeShell, runs: Path) -> None:
    run = shell(runs / "base", runs / "cand")
    code, text = run("ls")
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["type"] == ["baseline", "candidate"]
    assert rows["Linear"] == ["8", "8"]
    text = run("ls -n encoder -t linear -p backward")[1]
    assert [line.split()[1:] for line in text.splitlines()[1:]] == [
        ["torch.nn.functional.linear", "encoder/torch.nn.functional.linear#0", "backward", step, "api"] for step in "01"
    ]
    assert "and 6 more calls" in run("ls -t Linear -g module -l 2")[1]
    assert "near are" in run.fails("ls -t 'torch.nn.functional.linaer*'")
    assert "trueup triage" in run.fails("ls -f pass")


def test_ni_shows_both_sides_and_the_neighbours(shell: MakeShell, runs: Path, tmp_path: Path) -> None:
    run = shell(runs / "base", runs / "cand")
    code, text = run("ni head/torch.nn.functional.linear#0 -p backward --step 1")
    assert code == 0
    assert text.splitlines()[0] == "head/torch.nn.functional.linear#0  backward, step 1, rank 0, api"
    assert re.search(r"^  baseline   seq \d+ of .*base$", text, re.MULTILINE)
    assert re.search(r"^  candidate  seq \d+ of .*cand$", text, re.MULTILINE)
    assert re.search(r"^  grad_output\.0  float32 \[8, 3\]", text, re.MULTILINE)
    assert re.search(r"^  reads +grad_output\.0  seq \d+ +torch.nn.functional.cross_entropy#0  grad_input\.0", text, re.MULTILINE)
    assert "conftest.py" in text
    run("vc")
    text = run("ni encoder/torch.nn.functional.linear#0 -p backward --step 0")[1]
    assert re.search(r"compared +deviates, \w+: rel. L2 in \d", text)
    run(f"ni head/torch.nn.functional.linear#0 -s 2 -o {tmp_path / 'g.gv'}")
    graph = (tmp_path / "g.gv").read_text()
    assert graph.startswith("digraph calls {")
    assert graph.count("->") >= 3


def test_a_name_that_means_several_calls_gives_the_first_and_says_so(shell: MakeShell, runs: Path) -> None:
    text = shell(runs / "base")("ni head/torch.nn.functional.linear#0")[1]
    assert text.startswith("the first of several; the others: seq ")
    assert "forward, step 0" in text
    assert "capture    seq" in text
    assert "baseline" not in text


def test_pt_prints_and_writes_a_tensor(shell: MakeShell, runs: Path, tmp_path: Path) -> None:
    run = shell(runs / "base", runs / "cand")
    code, text = run(f"pt head/torch.nn.functional.linear#0:output.0 --side base -p forward --step 0 -o {tmp_path / 'y.npy'}")
    assert code == 0
    assert "tensor  float32 [8, 3] on cpu" in text
    rows = [line.split() for line in text.splitlines() if re.match(r" ?(0|8|16)  ", line)]
    assert [row[0] for row in rows] == ["0", "8", "16"]
    y = np.load(tmp_path / "y.npy").reshape(-1)
    np.testing.assert_allclose([float(cell) for row in rows for cell in row[1:]], y, rtol=1e-3)
    run(f"pt {tmp_path / 'y.npy'} -o {tmp_path / 'y.txt'}")
    np.testing.assert_array_equal(np.loadtxt(tmp_path / "y.txt", dtype=np.float32), y)
    assert "expected: one of input.0" in run.fails("pt head/torch.nn.functional.linear#0")


def test_pt_without_elements_says_how_to_get_them(shell: MakeShell, runs: Path, tmp_path: Path) -> None:
    run = shell(runs / "base-stats")
    assert "Only statistics of it were kept" in run("pt head/torch.nn.functional.linear#0:output.0")[1]
    assert "--detail tensor" in run.fails(f"pt head/torch.nn.functional.linear#0:output.0 -o {tmp_path / 'y.npy'}")


def test_cp_compares_a_slot_with_its_counterpart(shell: MakeShell, runs: Path, tmp_path: Path) -> None:
    run = shell(runs / "base", runs / "cand")
    seq = seq_of(run("ls -t '*linear' -n encoder -p backward")[1], "encoder/torch.nn.functional.linear#0")
    code, text = run(f"cp {seq}:grad_input.1 -p 3 -o {tmp_path / 'cp.json'}")
    assert code == 1
    assert text.splitlines()[0].split() == ["NumCnt", "AllClose", "CosSim", "ErrorPer"]
    assert text.splitlines()[1].split()[:2] == ["96", "False"]
    assert sum(line.startswith("[") for line in text.splitlines()) == 3
    assert json.loads((tmp_path / "cp.json").read_text())["answer"] == "apart"
    assert run("cp head/torch.nn.functional.linear#0:input.0 --step 0")[0] == 0
    assert run(f"cp {seq}:grad_input.1 -al 100")[0] == 0
    assert run(f"cp cand:{seq}:grad_input.1 cand:{seq}:grad_input.1")[0] == 0
    name = "encoder/torch.nn.functional.linear#0:grad_input.1"
    assert run(f"cp -n {name} {name} --phase backward --step 0 --level api")[0] == 1
    assert "names no tensor" in run.fails("cp 3")


def test_cp_of_statistics_does_not_call_close_what_it_cannot_see(shell: MakeShell, runs: Path) -> None:
    run = shell(runs / "base-stats", runs / "cand-stats")
    seq = seq_of(run("ls -t '*linear' -n encoder -p backward")[1], "encoder/torch.nn.functional.linear#0")
    code, text = run(f"cp {seq}:grad_input.1 -al 100")
    assert code == 2
    assert "only statistics were kept" in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("vsc", "did you mean"),
        ("dc -n x", "trueup import"),
        ("vcs -c foo", "next:     help vcs"),
        ("vcs -c 2", "next:     help vcs"),
        ("vcs -l", "next:     help vcs"),
        ("ni", "A name is missing"),
        ("ni nowhere/op#0", "does not mean one call"),
        ("ni 'a", "cannot be read"),
        ("run", "run -- "),
        ("run --plain no-such-program-here", "cannot be started"),
        ("vcs -f /nonexistent.csv", "cannot be read"),
        ("pt x --side left", "expected: one of base, cand"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message(shell: MakeShell, runs: Path, line: str, said: str) -> None:
    message = shell(runs / "base", runs / "cand").fails(line)
    assert said in message
    assert "next:" in message or "check" in message


def test_help(shell: MakeShell, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shell(runs / "base")
    text = run("help")[1]
    assert [line.split()[0] for line in text.splitlines() if line and not line.startswith(" ")][:10] == [
        "ac", "vc", "vcs", "ls", "ni", "pt", "cp", "run", "help", "exit",
    ]  # fmt: skip
    assert run("help vcs")[0] == 0
    assert "--cosine" in capsys.readouterr().out
    assert run("")[0] == 0
    run("exit")
    assert run.session.over


def test_run_captures_again_with_the_options_of_before(shell: MakeShell, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[dict[str, object], list[str]]] = []

    def launched(options: dict[str, object], command: list[str]) -> int:
        asked.append((options, command))
        return 0

    monkeypatch.setattr("trueup.recording.recorder.launch.run", launched)
    run = shell(runs / "base", runs / "cand-stats")
    target = runs / "base-stats"  # a capture that is there: nothing ran
    assert run(f"run -o {target} -- python train.py --steps 3")[0] == 0
    options, command = asked[0]
    assert command == ["python", "train.py", "--steps", "3"]
    assert (options["detail"], options["level"], options["directory"]) == ("stats", ("module", "api"), str(target))
    assert run.session.candidate == target
    monkeypatch.setattr("trueup.recording.recorder.launch.run", lambda options, command: 3)
    assert run("run -d tensor -- false")[0] == 3
    assert run.session.candidate == target
    monkeypatch.setattr("trueup.recording.recorder.launch.run", lambda options, command: 0)
    alone = shell(runs / "base")
    text = alone(f"run -o {runs / 'cand'} -- python train.py")[1]
    assert text.startswith("candidate is ")
    assert alone("vc")[0] == 1


def test_an_imported_dump_is_looked_at_alike(shell: MakeShell, tmp_path: Path) -> None:
    import trueup

    for name, factor in (("base", 1.0), ("cand", -1.0)):
        for k in range(2):
            values = np.arange(1, 9, dtype=np.float32) * (factor if k else 1.0)
            (tmp_path / f"dump-{name}").mkdir(exist_ok=True)
            np.save(tmp_path / f"dump-{name}" / f"conv{k}_Conv2D.0.158919508158802{k}.npy", values)
        trueup.import_dump(tmp_path / f"dump-{name}", tmp_path / name)
    run = shell(tmp_path / "base", tmp_path / "cand")
    code, text = run("vcs -c 0.98")
    assert code == 1
    assert "conv1_Conv2D" in text
    assert "output.0 -1.000000" in text
    assert "conv0_Conv2D" in run("ls -n conv0")[1]
