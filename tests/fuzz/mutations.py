"""Ways to damage a capture directory, each drawn from a random source: the same seed gives the same damage."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

INTEGERS = (-1, 0, 1, 7, 63, 64, 2**31 - 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", "\0", "../../../../etc/passwd", "/etc/passwd", "rank-00001/../..", "tensors-0000.safetensors", "tensors-9999.safetensors",
    "tensors-0000.safetensors/", "a" * 100_000, "[" * 50_000, '{"a":' * 20_000, "<script>alert(1)</script>", "\x1b]0;owned\x07",
    "float128", "float4_e2m1fn", "object", "int2", "input.0", "output.0", "arguments", "NaN", "1e999", '{"eps": 1e999}', "null",
    "🦀" * 50,
)  # fmt: skip


def files(capture: Path, *suffixes: str) -> list[Path]:
    """Return the files of a capture, in order, with one of these suffixes."""
    found = (p for p in capture.rglob("*") if p.is_file() and not p.is_symlink())
    return sorted(p for p in found if not suffixes or p.suffix in suffixes)


def mutate(capture: Path, chance: random.Random) -> list[str]:
    """Damage a capture in one to three ways and return what was done."""
    done = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        mutation = chance.choice(MUTATIONS)
        done.append(f"{mutation.__name__}: {mutation(capture, chance)}")
    return done


# ---------------------------------------------------------------- bytes
def flip_bytes(capture: Path, chance: random.Random) -> str:
    path = chance.choice(files(capture) or [capture / "none"])
    return _rewrite(path, lambda whole: _flipped(whole, chance))


def flip_the_end(capture: Path, chance: random.Random) -> str:
    """Footers of Parquet and headers of safetensors: where sizes and places are."""
    path = chance.choice(files(capture, ".parquet", ".safetensors") or [capture / "none"])

    def change(whole: bytearray) -> bytes:
        edge = bytearray(whole[:600]) if path.suffix == ".safetensors" else bytearray(whole[-600:])
        edge = bytearray(_flipped(edge, chance))
        return bytes(edge + whole[600:]) if path.suffix == ".safetensors" else bytes(whole[:-600] + edge)

    return _rewrite(path, change)


def truncate(capture: Path, chance: random.Random) -> str:
    path = chance.choice(files(capture) or [capture / "none"])
    return _rewrite(path, lambda whole: bytes(whole[: chance.randrange(len(whole) + 1)]))


def grow(capture: Path, chance: random.Random) -> str:
    path = chance.choice(files(capture) or [capture / "none"])
    return _rewrite(path, lambda whole: bytes(whole) + chance.randbytes(chance.choice((1, 16, 5000))))


def blank(capture: Path, chance: random.Random) -> str:
    path = chance.choice(files(capture) or [capture / "none"])

    def change(whole: bytearray) -> bytes:
        begin = chance.randrange(len(whole) + 1)
        end = min(len(whole), begin + chance.choice((8, 512, 4096)))
        whole[begin:end] = bytes(end - begin)
        return bytes(whole)

    return _rewrite(path, change)


def _flipped(whole: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 4, 40))):
        if whole:
            whole[chance.randrange(len(whole))] = chance.randrange(256)
    return bytes(whole)


def _rewrite(path: Path, change: Callable[[bytearray], bytes]) -> str:
    if not path.is_file():
        return "nothing left to change"
    path.write_bytes(change(bytearray(path.read_bytes())))
    return str(path)


# ---------------------------------------------------------------- files
def remove(capture: Path, chance: random.Random) -> str:
    path = chance.choice(sorted(capture.rglob("*")) or [capture / "none"])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return str(path)


def swap(capture: Path, chance: random.Random) -> str:
    some = files(capture)
    if len(some) < 2:
        return "nothing left to swap"
    first, second = chance.sample(some, 2)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    return f"{first} {second}"


def link(capture: Path, chance: random.Random) -> str:
    """Put a link, a pipe or a folder where a file was."""
    path = chance.choice(files(capture) or [capture / "manifest.json"])
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = chance.choice(("outside", "device", "endless", "itself", "pipe", "folder"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        to = {"outside": "/etc/passwd", "device": "/dev/urandom", "endless": "/dev/zero", "itself": path.name}[kind]
        path.symlink_to(to)
    return f"{kind} {path}"


def add_odd_names(capture: Path, chance: random.Random) -> str:
    where = chance.choice([capture, *sorted(p for p in capture.iterdir() if p.is_dir() and not p.is_symlink())])
    name = chance.choice((
        "rank-99999", "rank-999999999", "rank-00000000000", "step-999999999", "step-000000", "records-999999999.parquet",
        "tensors-999999999.safetensors", "sites-0001.parquet", "manifest.json.tmp", "processes", "unranked-1", "rank-\n00001",
    ))  # fmt: skip
    path = where / name
    if not path.exists() and not path.is_symlink():
        if "." in name:
            path.write_bytes(chance.randbytes(100))
        else:
            path.mkdir()
            (path / "records-0000.parquet").write_bytes(b"PAR1PAR1")
    return str(path)


# ---------------------------------------------------------------- JSON
def hostile_value(chance: random.Random) -> Any:
    return chance.choice((
        chance.choice(INTEGERS), chance.choice(FLOATS), chance.choice(TEXTS), None, True, [], {}, [[[]]], 10**400,
        {"a": {"b": [1, None]}}, [chance.choice(TEXTS)] * 3, ["x"] * 10_000, {str(k): k for k in range(5000)},
    ))  # fmt: skip


def alter_manifest(capture: Path, chance: random.Random) -> str:
    """Put something else in place of any value, at any depth, or a value where none was."""
    path = chance.choice(files(capture, ".json") or [capture / "manifest.json"])
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return "no manifest left to alter"
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(content)
    changed = []
    for _ in range(chance.choice((1, 2, 5))):
        if places:
            holder, key = chance.choice(places)
            holder[key] = hostile_value(chance)
            changed.append(str(key))
    path.write_text(json.dumps(content), errors="surrogatepass")
    return f"{path} {changed}"


def odd_json(capture: Path, chance: random.Random) -> str:
    path = chance.choice([capture / "manifest.json", *files(capture, ".json")])
    path.unlink(missing_ok=True)
    path.write_text(chance.choice((
        "", "null", "[]", "[" * 200_000, '{"a":' * 100_000, '{"format_version": 1}', '{"format_version": 1e999}', "1" * 100_000,
        '{"format_version": 1, "format_version": 2}', '{"format_version": 1, "levels": 5, "config": [], "status": {}}',
        '{"format_version": 1, "levels": "aten", "environment": "x", "devices": 3, "framework": 7, "notes": "n", "rank": "r"}',
        '"\\ud800"', "\ufeff{}", '{"format_version": ' + "9" * 5000 + "}",
    )))  # fmt: skip
    return str(path)


# ---------------------------------------------------------------- well-formed files with ill contents
def alter_records(capture: Path, chance: random.Random) -> str:
    """Rewrite a part, or the call stacks, with a hostile value in some rows of some columns; sound as a Parquet file."""
    path = chance.choice(files(capture, ".parquet") or [capture / "none"])
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError, ValueError, TypeError):
        return "no part left to alter"
    names = chance.sample(table.column_names, min(chance.choice((1, 1, 2, 4)), table.num_columns))
    for name in names:
        values = table[name].to_pylist()
        kind = table.schema.field(name).type
        share = chance.choice((0.02, 0.3, 1.0))
        same = _value(kind, chance)
        values = [(same if share == 1.0 else _value(kind, chance)) if chance.random() < share else v for v in values]
        column = pa.array(values, kind)
        table = table.set_column(table.column_names.index(name), name, column)
    chosen = chance.random()
    if chosen < 0.1:
        table = table.drop_columns([chance.choice(table.column_names)])
    elif chosen < 0.2:
        table = table.take(pa.array(chance.choices(range(table.num_rows), k=table.num_rows)))
    elif chosen < 0.25:
        table = table.slice(0, 0)
    elif chosen < 0.3:
        table = table.rename_columns([*table.column_names[:-1], table.column_names[0]])
    pq.write_table(table, path)
    return f"{path} {names}"


def _value(kind: pa.DataType, chance: random.Random) -> Any:
    if chance.random() < 0.15:
        return None
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_fixed_size_binary(kind):
        return b"".join(struct.pack("<d", chance.choice(FLOATS)) for _ in range(kind.byte_width // 8))
    if pa.types.is_list(kind):
        return [_value(kind.value_type, chance) for _ in range(chance.choice((0, 1, 3, 7, 70)))]
    if pa.types.is_integer(kind):
        high = 2 ** (kind.bit_width - 1)
        return max(-high, min(high - 1, chance.choice(INTEGERS)))
    return chance.choice(FLOATS) if pa.types.is_floating(kind) else chance.choice(TEXTS)


def alter_segment(capture: Path, chance: random.Random) -> str:
    """Rewrite the header of a payload segment: other places, shapes and dtypes, well-formed as JSON."""
    path = chance.choice(files(capture, ".safetensors") or [capture / "none"])
    try:
        whole = path.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
    except (OSError, ValueError, RecursionError):
        return "no segment left to alter"
    if not isinstance(header, dict) or not header:
        return "no header"
    for _ in range(chance.choice((1, 3, 10))):
        entry = header[chance.choice(list(header))]
        if not isinstance(entry, dict) or not entry:
            continue
        entry[chance.choice(list(entry))] = chance.choice((
            [0, 2**62], [-8, 8], [8, 0], [0, 0], [2**40], [2**31, 2**31, 2**31], [1] * 100, [-1], "F64", "F8_E4M3", "X", "I4",
            hostile_value(chance),
        ))  # fmt: skip
    text = json.dumps(header).encode()
    lie = chance.choice((0, 0, 0, 1, -1, 2**40))
    path.write_bytes(max(0, len(text) + lie).to_bytes(8, "little") + text + whole[8 + length :])
    return str(path)


MUTATIONS: tuple[Callable[[Path, random.Random], str], ...] = (
    flip_bytes, flip_the_end, truncate, grow, blank, remove, swap, link, add_odd_names, alter_manifest, alter_manifest, odd_json,
    alter_records, alter_records, alter_records, alter_records, alter_segment, alter_segment,
)  # fmt: skip
"""Each as often as it is drawn."""
