"""What is left of a broken capture is read, and what is missing is said."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture

from .captures import small

PART = "rank-00000/step-000001/records-0001.parquet"
SEGMENT = "rank-00000/tensors-0000.safetensors"


def test_truncated_at_every_kind_of_place(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    whole = (run / PART).read_bytes()
    places = {
        0,
        1,
        4,
        8,
        len(whole) // 2,
        len(whole) - 9,
        len(whole) - 1,
        *random.Random(1).sample(range(len(whole)), 30),
    }
    for place in places:
        (run / PART).write_bytes(whole[:place])
        capture = open_capture(run)
        table = capture.records(["step", "seq"])
        assert table.num_rows == 60
        assert len(capture.problems) == 2
        assert re.match(
            r"rank 0 step 1: records-0001.parquet is truncated or damaged \(.+\); skipped, its calls are missing",
            capture.problems[0],
        )
        missing = "rank 0: 1 part of records with 12 rows is missing after step-000001/records-0000.parquet"
        assert capture.problems[1] == missing


def test_flipped_bytes_are_noticed_or_harmless(tmp_path: Path) -> None:
    """A flipped bit in a page fails its checksum; one in the footer that still parses must not crash anything."""
    run = small(tmp_path / "run", steps=2, parts=2)
    whole = (run / PART).read_bytes()
    expected = open_capture(run).records(["l2", "digest", "value"], step=0)
    chance = random.Random(2)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        (run / PART).write_bytes(damaged)
        capture = open_capture(run)
        capture.records()
        assert capture.records(["l2", "digest", "value"], step=0).equals(expected)


def test_leftover_and_missing_files_are_named(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    (run / "rank-00000/step-000002/records-0002.parquet.tmp").write_bytes(b"PAR1")
    (run / "rank-00000/tensors-0001.safetensors.tmp").write_bytes(b"")
    (run / "rank-00000/step-000000/records-0000.parquet").unlink()
    (run / "rank-00000/sites-0000.parquet").unlink()
    (run / SEGMENT).unlink()
    capture = open_capture(run)
    assert capture.problems == [
        "rank 0 step 0: records-0000.parquet is missing, and its calls",
        "rank 0 step 2: records-0002.parquet.tmp was never finished; its calls are missing",
        "rank 0: tensors-0001.safetensors.tmp was never finished; what it would have held is missing",
        "rank 0: 1 part of records with 12 rows is missing at the beginning",
        f"rank 0: {run / SEGMENT} is missing: its tensors cannot be read; copy it back from the machine that recorded "
        "the capture, or record again",
        "rank 0: the call stacks (sites-*.parquet) are missing; findings have no source",
    ]
    with pytest.raises(TrueupError, match="is missing: its tensors cannot be read; copy it back"):
        capture.payload(0, "tensors-0000.safetensors", "x")


def test_rank_manifest_lost(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    manifest = run / "rank-00000/manifest.json"
    manifest.write_text("{")
    capture = open_capture(run)
    assert capture.ranks == {0: {}}
    assert capture.records(["seq"]).num_rows == 72
    assert f"rank 0: {manifest} is damaged: expected JSON, got " in capture.problems[0]
    manifest.unlink()
    assert open_capture(run).problems == ["rank 0 has no manifest.json: the process ended as it began to record"]


def test_damaged_segment_and_sites(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    row = open_capture(run).records(["payload_segment", "payload_key"], step=0).slice(0, 1).to_pylist()[0]
    whole = (run / SEGMENT).read_bytes()
    for place in range(len(whole)):
        (run / SEGMENT).write_bytes(whole[:place])
        with pytest.raises(TrueupError, match=r"truncated|damaged"):
            open_capture(run).payload(0, row["payload_segment"], row["payload_key"])
    assert "truncated" in open_capture(run).problems[0]
    (run / "rank-00000/sites-0000.parquet").write_bytes(b"PAR1PAR1")
    capture = open_capture(run)
    assert capture.sites(0) == {}
    assert "rank 0: sites-0000.parquet is damaged" in capture.problems[-1]


CHILD = """
import sys
from pathlib import Path
import numpy as np
import trueup.foundation.store.writer
from trueup.foundation.store import Writer, claim
trueup.foundation.store.writer.SEGMENT_BYTES = 50_000
run = Path(sys.argv[1])
out = Writer(run, claim(run, 0), {}, {})
print("ready", flush=True)
seq = 0
while True:
    for step in range(10_000):
        raw = np.full(5_000, seq, np.int32).tobytes()
        segment, key = out.add_payload(f"{seq:016x}", "int32", (5_000,), raw)
        out.add_sites([(seq, [f"train.py:{seq} in f"], None)])
        n = 50
        out.write_records(step, {"seq": [seq] * n, "site": [seq] * n, "payload_segment": [segment] * n,
                                 "payload_key": [key] * n, "sketch": np.ones((n, 64))})
        seq += 1
"""


@pytest.mark.parametrize("delay", [0.0, 0.011, 0.037, 0.083, 0.15])
def test_killed_while_writing(tmp_path: Path, delay: float) -> None:
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", CHILD, str(run)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
    capture = open_capture(run)
    told = "rank 0 was interrupted or is still recording (status 'recording'): readable up to the last flush"
    assert told in capture.problems
    assert all(problem == told or ".tmp was never finished" in problem for problem in capture.problems)
    table = capture.records(["seq", "site", "payload_segment", "payload_key"])
    assert sorted(set(table["seq"].to_pylist())) == list(range(table.num_rows // 50))
    sites = capture.sites(0)
    for row in table.to_pylist()[::50]:
        assert sites[row["site"]][0] == (f"train.py:{row['seq']} in f",)
        assert np.all(capture.payload(0, row["payload_segment"], row["payload_key"]) == row["seq"])


def test_many_steps_open(tmp_path: Path) -> None:
    assert len(open_capture(small(tmp_path / "run", steps=300, parts=1)).steps) == 300
