# ruff: noqa: E501, PT018 - lines of logs, and what may be None
"""`trueup explain-log`: every row of the knowledge base, 312 labelled pieces of logs, which error came first, and logs of any
kind."""

from __future__ import annotations

import gzip
import io
import json
import re
from pathlib import Path

import pytest

from trueup.doors.cli import main
from trueup.foundation.model import TrueupError
from trueup.migration.knowledge import explain, operators
from trueup.migration.knowledge.explaining import STOPS, Collected, concluded, moment, peers_in, rank_in, rank_of_file
from trueup.migration.knowledge.logs import Row, lines, nearest, pieces_in, plain_piece, readers, row_of, rows

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs/explain-log.md").read_text("utf-8")


def pieces(name: str) -> list[tuple[str, str]]:
    file = HERE / name if (HERE / name).exists() else HERE.parents[1] / "benchmarks" / name
    parts = re.split(r"^== ", file.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return [(label, body) for label, _, body in (part.partition("\n") for part in parts)]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_a_row_takes_its_samples_and_no_others(row: Row) -> None:
    patterns = [re.compile(text.encode()) for text in row.says]
    assert all(any(one.search(sample.encode()) for one in patterns) for sample in row.hit)
    assert not any(one.search(sample.encode()) for one in patterns for sample in row.miss)
    assert row.cause.endswith(".") and row.remedy and row.origin
    assert row.role == "note" or (row.probe and row.check)
    assert not any(
        re.search(r"\(\?[=!<](?!i)", text) or "|" in re.sub(r"\([^()]*\)", "", text).replace("\\|", "") for text in row.says
    )


def test_rows_have_names_of_their_own_and_the_guide_is_there_whole() -> None:
    names = [row.id for row in rows()]
    assert len(names) == len(set(names)) >= 24 + 60
    guide = [row for row in rows() if (row.origin or "").startswith("Ascend, PyTorch porting")]
    assert len(guide) == 24
    assert {row.id for row in guide if row.corrects} >= {"npu-no-operator", "npu-leftover", "state-dict-keys"}


@pytest.mark.parametrize(("name", "count", "innocent"), [("pieces.txt", 312, 156), ("later.txt", 39, 10), ("log_pieces.txt", 204, 102), ("fourth.txt", 45, 11)])
def test_labelled_pieces(tmp_path: Path, name: str, count: int, innocent: int) -> None:
    """At first sight, the rows written after the pieces: 154 of 156 errors by their row, 0 of 156 innocent pieces flagged. Of the later
    ones, which the rows were not written for: 24 of 29 errors (3 unknown, 1 as true in another row), 0 of 10 flagged."""
    held = pieces(name)
    assert (len(held), sum(label == "-" for label, _ in held)) == (count, innocent)
    for at, (_, body) in enumerate(held):
        (tmp_path / f"{at:03d}.log").write_text(body, "utf-8")
    some = readers([str(tmp_path)])
    got = [Collected() for _ in some]
    for line in lines(some, Collected().wanted):
        got[line.log].take(line, None)
    found = [concluded(one, some) for one in got]
    said = [one.first.row.id if one.first and one.first.row else "?" if one.exit_code else "-" for one in found]
    wrong = [(label, row, body[:80]) for (label, body), row in zip(held, said, strict=True) if row not in label.split()]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "piece"),
    [(r"GPU has fallen", "GPU has fallen"), (r"Xid \(PCI:[^)]*\): 79,", "Xid (PCI:"), (r"(?:a|b)cdefg?h", "cdef"), (r"\bEZ3002\b", "EZ3002"),
     (r"code is 5070(?:11|15)", "code is 5070"), (r"x{2,3}yz\.so", "yz.so")],
)  # fmt: skip
def test_the_plain_piece_of_an_expression(text: str, piece: str) -> None:
    assert plain_piece(text) == piece


def test_the_pieces_of_a_line_are_those_that_it_holds() -> None:
    known = {piece for row in rows() for text in row.says if len(piece := plain_piece(text)) >= 5}
    for line in (sample for row in rows() for sample in (*row.hit, *row.miss)):
        assert sorted(pieces_in(line.encode())) == sorted(piece for piece in known if piece in line)


def test_every_sample_is_taken_at_the_first_look(tmp_path: Path) -> None:
    log = tmp_path / "all.log"
    samples = [sample for row in rows() for sample in row.hit]
    log.write_text("\n".join(sample.replace("\n", " ") for sample in samples), "utf-8")
    assert len(list(lines(readers([str(log)]), Collected().wanted))) == len(samples)


def write(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text, "utf-8")
    return [str(folder / f"{name}.log") for name in texts]


TIMEOUT = "[rank{0}]:[E301 10:14:0{0}.000000000 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE)\n"
MEMORY = '2026-03-01 10:04:02,000 INFO step 101\nTraceback (most recent call last):\n  File "train.py", line 57, in <module>\n    x = f(x)\n  File "/v/site-packages/torch/nn/functional.py", line 9, in f\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n'


def test_the_first_error_is_that_of_the_rank_that_stopped_first(tmp_path: Path) -> None:
    found = explain(write(tmp_path, rank0=TIMEOUT.format(0, 7), rank1=MEMORY, rank2=TIMEOUT.format(2, 7)))
    assert found.first is not None and found.first.row is not None
    assert (found.first.row.id, found.first.rank, found.first.source, found.exit_code) == ("cuda-memory", 1, "train.py:57", 1)
    assert [(one.row.id, one.rank) for one in found.echoes if one.row] == [("nccl-timeout", 0), ("nccl-timeout", 2)]


def test_what_one_log_says_too_often_is_looked_for_in_the_next(tmp_path: Path) -> None:
    """Once 2,000 lines of a row were seen, lines of it were left out of all logs: the error of the rank that stopped first, too."""
    padding = "2026-03-01 10:30:00,000 INFO a step\n" * 240_000  # more than 8 MB: the count holds from the next pass on
    often = MEMORY.replace("10:04", "10:20") + "torch.OutOfMemoryError: CUDA out of memory.\n" * 2_500
    found = explain(write(tmp_path, rank0=often + padding + often, rank1=MEMORY))
    assert found.first and (found.first.rank, found.first.line) == (1, 6)
    assert [(one.rank, one.count) for one in found.others] == [(0, 2_501)]


def test_what_a_line_names_is_called_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was an operator whatever it was."""
    text = "ImportError: libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by libtorch_python.so)\n"
    assert main(["explain-log", *write(tmp_path, a=text)]) == 1
    assert "names  version GLIBCXX_3.4.30" in capsys.readouterr().out


def test_the_last_time_before_a_line_is_that_of_its_own_log(tmp_path: Path) -> None:
    a, b = MEMORY, "torch.OutOfMemoryError: CUDA out of memory.\nRuntimeError: no row knows this\n"
    found = explain(write(tmp_path, a=a + "RuntimeError: unknown in a\n", b=b))
    assert found.first and found.first.time.endswith("10:04:02,000")
    assert [(one.text, one.time[11:]) for one in found.unknown] == [("RuntimeError: unknown in a", "10:04:02,000"), ("RuntimeError: no row knows this", "")]


def test_ranks_that_only_lost_a_peer_explain_nothing_and_point_at_it(tmp_path: Path) -> None:
    found = explain(write(tmp_path, a=TIMEOUT.format(0, 7) + TIMEOUT.format(1, 7) + TIMEOUT.format(3, 7)))
    assert (found.exit_code, found.suspects) == (2, ("rank 2, which says nothing here",))
    assert found.sentence == "These ranks only lost another one, which stopped first: look at rank 2, which says nothing here."
    found = explain(write(tmp_path, b=TIMEOUT.format(0, 7) + TIMEOUT.format(1, 6)))
    assert found.suspects == ("rank 1, which was behind at collective 6",)
    found = explain(write(tmp_path, c="[rank0]: EI0002: The Notify register times out. Reason: no record from remote rank [3]\n"))
    assert found.suspects == ("rank 3, which others waited for",)


def test_a_rank_of_minus_one_is_none() -> None:
    assert peers_in(b"EI0006 wait from remote rank [4294967295], then remote rank [12]") == {12}
    assert rank_in(b"[rank4294967295]: no rank") is None


def test_a_killed_process_counts_only_where_nothing_else_does(tmp_path: Path) -> None:
    killed = "2026-03-01 10:20:00,000 failed (exitcode: -9) local_rank: 5 (pid: 2630)\n"
    found = explain(write(tmp_path, a=killed + MEMORY.replace("10:04", "10:30")))
    assert found.first and found.first.row and found.first.row.id == "cuda-memory"
    found = explain(write(tmp_path, a=killed))
    assert found.first and found.first.row and found.first.row.id == "killed-memory"


def test_the_host_log_names_the_operator_that_the_shell_does_not(tmp_path: Path) -> None:
    shell = "2021-02-02-22:24:00.000 x\nRuntimeError: HelpACLExecute: NPU error\n"
    host = "[ERROR] GE(9,p):2021-02-02-22:23:56.475 op topKD: The number of attrs in op desc and op store does not match.\n"
    found = explain(write(tmp_path, shell=shell, plog=host))
    assert found.first and found.first.row and found.first.row.id == "npu-operator-attributes"
    assert [one.row.id for one in found.others if one.row] == ["npu-asynchronous"]


def test_an_unknown_error_is_said_to_be_unknown_with_what_is_near(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: Attempting to unscale FP8 gradients of a list\n'
    found = explain(write(tmp_path, a=text))
    assert (found.exit_code, found.verdict, found.first and found.first.row) == (2, "COULD NOT TELL", None)
    assert found.near[0].id == "unscale-half"
    assert nearest("KeyError: 'labels'") == []
    found = explain(write(tmp_path, b="[ERROR] something odd\nall is well\n"))
    assert (found.exit_code, found.claimed) == (2, 1)
    assert explain(write(tmp_path, c="step 1\n")).exit_code == 0


@pytest.mark.parametrize(
    ("line", "seconds", "dated"),
    [("[ERROR] R(1,p):2021-02-02-22:23:56.475.679 [x]", 1612304636.475679, True), ("E0000 00:00:1736163964.084812 34", 1736163964.084812, True),
     ("2026-03-01T10:04:02Z", 1772359442.0, True), ("10/12/2023 21:03:35 - INFO", 1697144615.0, True), ("[rank0]:[E321 02:07:08.40 P", 953604428.4, False),
     ("May 27 16:50:10 host kernel:", 959446210.0, False)],
)  # fmt: skip
def test_times(line: str, seconds: float, dated: bool) -> None:
    found = moment(line.encode())
    assert found is not None and found.dated == dated
    assert found.seconds == pytest.approx(seconds, abs=1e-3)
    assert moment(b"iteration 12:99 of 13:45") is None


def test_ranks() -> None:
    assert [rank_in(text) for text in (b"[rank3]: x", b"[PG 0 Rank 6] x", b"RankID:1)", b"RankID:-1)", b"ranking 5")] == [
        3,
        6,
        1,
        None,
        None,
    ]
    assert [rank_of_file(name) for name in ("logs/rank_3.log", "x/attempt_0/2/stderr.log", "output_npu_7.log", "train.log")] == [
        3,
        2,
        7,
        None,
    ]


def test_logs_that_are_packed_damaged_binary_or_endless(tmp_path: Path) -> None:
    packed = tmp_path / "a.log.gz"
    packed.write_bytes(gzip.compress(MEMORY.encode() * 50))
    assert explain([str(packed)]).exit_code == 1
    packed.write_bytes(packed.read_bytes()[:-20])
    assert "is damaged, and was read up to there" in explain([str(packed)]).remarks[0]
    odd = tmp_path / "odd.log"
    odd.write_bytes(b"\x00\xff\xfe" * 1000 + b"\rloss is nan\x00\r" + b"a error " * 1_200_000)
    found = explain([str(odd)])
    assert (found.first and found.first.row and found.first.row.id, found.first and found.first.line) == ("loss-nan", 2)


def test_what_comes_again_and_again_hides_nothing(tmp_path: Path) -> None:
    noise = "RuntimeError: NCCL error in: P.cpp:{0}, unhandled system error {0}, which goes on and on for a while, so that there are some bytes\n"
    found = explain(write(tmp_path, a="".join(noise.format(k) for k in range(60_000)) + "GPU has fallen off the bus.\n"))
    assert found.first and found.first.row and found.first.row.id == "gpu-lost"


def test_secrets_stay_out(tmp_path: Path) -> None:
    found = explain(write(tmp_path, a="RuntimeError: Socket Timeout, token=hf_abcdefghijklmnopqrstuvwxyz012345\n"))
    assert "hf_abc" not in json.dumps(found.document())


def test_operators_of_a_host_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "[INFO] ASCENDCL(3,p):2021-07-01-10:00:00.000 [c.cpp:3]3 aclopCompile::aclOp OpType: {}, INPUT [1,{}]].\n"
    compiled = "[INFO] ASCENDCL(3,p):2021-07-01-10:00:00.000 [c.cpp:4]3 To compile op\n"
    text = "".join(f"step {n}\n" + asked.format("TransData", 3) + asked.format("Add", n) + compiled for n in (1, 2, 3))
    found = operators(write(tmp_path, plog=text))
    rows = [(one.type, one.parameters, one.asked, one.late, one.first, one.last) for one in found.operators]
    assert rows == [
        ("Add", "INPUT [1,2]", 1, 1, 2, 2),
        ("Add", "INPUT [1,3]", 1, 1, 3, 3),
        ("TransData", "INPUT [1,3]", 3, 0, 1, 3),
        ("Add", "INPUT [1,1]", 1, 0, 1, 1),
    ]
    assert (found.exit_code, found.sentence) == (
        1,
        "2 operators with 4 sets of parameters, asked for 6 times in 3 steps; Add compiled after step one.",
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain-log", "--operators", *write(tmp_path, plog=text)]) == 1
    out = capsys.readouterr().out
    assert "3 calls only copy or change a format: TransData." in out
    assert "next: fix the shapes or attributes that change" in out
    assert operators(write(tmp_path, other="nothing\n")).exit_code == 2
    with pytest.raises(TrueupError, match="--step cannot be read"):
        operators(write(tmp_path, other="nothing\n"), "(")


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-log"]) == 64
    assert "There is no log to explain." in capsys.readouterr().err
    assert main(["explain-log", str(tmp_path / "none.log")]) == 2
    assert "got:      nothing of that name" in capsys.readouterr().err
    assert main(["explain-log", str(tmp_path)]) == 2
    assert "expected: files, folders that hold files" in capsys.readouterr().err


def test_the_page_s_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
    logs, shown = blocks[0][1], blocks[1][1]
    for part in re.split(r"^==> ", logs, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition(" <==\n")
        (tmp_path / name).write_text(body, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["explain-log", "rank0.log", "rank1.log", "--json", "out.json"]) == 1
    out = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert shown.partition("\n")[2].strip() in out
    document = json.loads((tmp_path / "out.json").read_text())
    assert (document["schema"], document["row"]["id"]) == ("trueup-explain-log", "cuda-memory")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"KeyError: 'labels'\n")))
    capsys.readouterr()
    assert main(["explain-log", "-"]) == 2
    assert "next  Give the logs of all ranks" in capsys.readouterr().out


def test_lines_that_stop_are_taken_whatever_they_say() -> None:
    assert all(re.search(STOPS, text) for text in ("KeyError: 'x'", "  what():  odd", "AssertionError: "))
    assert row_of(b"nothing at all") is None
