"""How a comparison grows with the ranks: four real data-parallel processes, synthesised to thousands, one bad.

    ranks      slots a side   seconds   of them CPU   peak MB   read MB   verdict
     1,024          397,312      31.2          58.9       812       190   deviates: rank 137

Four processes train a small network under gloo, twice; in the second run one of them computes a normalisation with another ``eps``.
Rank r of the large pair is what a healthy rank recorded, with its own number in it (and all ranks in the groups of collectives);
the bad one stands once, in the middle. ``--rounding`` gives each float tensor of the candidate an error of 1e-7, as another device
would: then no digest agrees, and everything has to be measured. The pairs stay in ``--cache``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from compare_synthesis import Template
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.durable import put
from trueup.foundation.store.layout import MANIFEST, rank_name, records_name, step_name
from trueup.foundation.store.parts import contents, sealed
from trueup.foundation.store.writer import encode_records

REAL = 4  # processes that really train
SICK = 1  # of them computes something else in the candidate

SCRIPT = '''
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
eps = 0.1 if len(sys.argv) > 1 and rank == int(sys.argv[1]) else 1e-5
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64, eps=eps), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(rank)
for _ in range(2):
    x, y = torch.randn(16, 32, generator=generator), torch.randint(8, (16,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
'''


def record(into: Path) -> tuple[Path, Path]:
    """Record the four real ranks of both runs, or find them."""
    script = into / "train.py"
    sides = into / "real-baseline", into / "real-candidate"
    into.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT)
    for side, sick in zip(sides, ([], [str(SICK)]), strict=True):
        if (side / MANIFEST).exists():
            continue
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(REAL), "--master-port", str(port), str(script), *sick]
        asked = ["capture", "-o", str(side), "--level", "api", "--steps", "0:1", "--", sys.executable, *launch]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "trueup", *asked], check=True, env=environment, stdout=subprocess.DEVNULL)
    return sides


def synthesise(real: Path, ranks: int, into: Path, *, sick: int, rounding: bool) -> int:
    """Write a capture of so many ranks, of which ``sick`` is what `SICK` recorded; return its rows. Nothing is synced."""
    source = open_capture(real)
    into.mkdir(parents=True)
    shutil.copy(real / MANIFEST, into)
    healthy = [rank for rank in source.ranks if rank != SICK]
    held = {rank: _of_ranks(source, rank, ranks) for rank in source.ranks}
    templates = {rank: {step: Template(table) for step, table in held[rank].items()} for rank in source.ranks}
    rows = 0
    for rank in range(ranks):
        of = SICK if rank == sick else healthy[rank % len(healthy)]
        tables = {s: t.at(0, differs=True, rank=rank) for s, t in templates[of].items()} if rounding else held[of]
        rows += _write_rank(real / rank_name(of), into / rank_name(rank), tables, rank, ranks)
    return rows


def _of_ranks(source: Capture, rank: int, ranks: int) -> dict[int, pa.Table]:
    """Return a rank's records by step, with all ranks in the groups of its collectives."""
    found = {}
    for step in source.steps:
        table = source.records(rank=rank, step=step)
        place = table.column_names.index("value")
        texts = [text and text.replace(f'"0-{REAL - 1}"', f'"0-{ranks - 1}"') for text in table["value"].to_pylist()]
        found[step] = table.set_column(place, table.schema.field(place), pa.array(texts, table.schema.field(place).type))
    return found


def _write_rank(real: Path, folder: Path, tables: dict[int, pa.Table], rank: int, ranks: int) -> int:
    folder.mkdir()
    manifest = json.loads((real / MANIFEST).read_text()) | {"rank": rank, "world_size": ranks, "writer": f"{rank:016x}"}
    parts = rows = 0
    for step, table in tables.items():
        table = table.set_column(table.column_names.index("rank"), "rank", pa.array(np.full(len(table), rank, np.int32)))
        file, lanes = encode_records(table)
        place = {"part": 0, "writer": manifest["writer"], "before": {"parts": parts, "rows": rows}}
        told = contents(table, rank, step) | {"sketches": None if lanes is None else lanes.told(), **place}
        (folder / step_name(step)).mkdir()
        put(folder / step_name(step) / records_name(0), sealed(file, told), sync=False)
        parts, rows = parts + 1, rows + len(table)
    for sites in real.glob("sites-*.parquet"):
        shutil.copy(sites, folder)
    written = {"parts": parts, "rows": rows, "payload_bytes": 0}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"written": written}))
    return rows


def pair(cache: Path, ranks: int, *, rounding: bool) -> tuple[Path, Path, int]:
    """Return both sides of a size, made if need be, and the slots of each."""
    real = record(cache)
    folder = cache / f"{ranks}{'-rounding' if rounding else ''}"
    mark = folder / "rows.json"
    if not mark.exists():
        shutil.rmtree(folder, ignore_errors=True)
        started = time.perf_counter()
        rows = synthesise(real[0], ranks, folder / "baseline", sick=ranks // 2, rounding=False)
        synthesise(real[1], ranks, folder / "candidate", sick=ranks // 2, rounding=rounding)
        mark.write_text(json.dumps(rows))
        print(f"made {ranks:,} ranks in {time.perf_counter() - started:.0f} s", flush=True)
    return folder / "baseline", folder / "candidate", json.loads(mark.read_text())


INSIDE = """
import json, sys
from trueup.doors.cli import main
code = main(sys.argv[1:])
with open("/proc/self/io") as file:  # with those of children that ended
    read = int(file.readline().split()[1])
print(json.dumps({"code": code, "read": read}))
"""


def measure(sides: tuple[Path, Path], slots: int, ranks: int, options: list[str]) -> dict[str, Any]:
    """Compare as a user does, and return what it took and printed."""
    with tempfile.TemporaryDirectory() as report, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-c", INSIDE, "compare", *map(str, sides), "-o", f"{report}/report", *options]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = said.read().splitlines()
        size = sum(file.stat().st_size for file in Path(report).rglob("*") if file.is_file())
    told = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {"code": process.returncode, "read": 0}
    return {
        "ranks": ranks, "slots": slots, "seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss / 1024,
        "read": told["read"] / 2**20, "code": told["code"], "report": size / 2**20, "printed": lines[:-1],
    }  # fmt: skip


def main() -> None:
    """Make the pairs, compare each, print a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64, 256, 1024])
    parser.add_argument("--rounding", action="store_true", help="the candidate rounds otherwise: no digest agrees")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "trueup-bench-ranks")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--say", action="store_true", help="print what the command printed")
    parser.add_argument("options", nargs="*", help="after --: options of trueup compare")
    asked = parser.parse_args()
    print(f"{'ranks':>7}{'slots a side':>15}{'seconds':>10}{'CPU':>9}{'peak MB':>10}{'read MB':>10}{'report MB':>11}  verdict")
    found = []
    for ranks in asked.ranks:
        *sides, slots = pair(asked.cache, ranks, rounding=asked.rounding)
        one = measure((sides[0], sides[1]), slots, ranks, asked.options)
        found.append(one)
        said = (line.strip() for line in one["printed"] if not line.startswith("trueup: "))  # how far it is
        first = next(filter(None, said), "")
        figures = f"{one['seconds']:>10.1f}{one['cpu']:>9.1f}{one['memory']:>10.0f}{one['read']:>10.1f}{one['report']:>11.1f}"
        print(f"{ranks:>7,}{slots:>15,}{figures}  {first[:90]}", flush=True)
        if asked.say:
            print("\n".join(one["printed"]))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
