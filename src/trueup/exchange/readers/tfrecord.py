"""Files of records (TFRecord): a length, its checksum, the bytes, theirs; told apart from damage by the checksums.

Format: tensorflow/core/lib/io/record_writer.h; CRC-32C (Castagnoli), masked by a rotation and a constant.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from trueup.exchange.readers.dump import UnreadableError
from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.tree import Tree

MASK = 0xA282EAD8
_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")


def records(tree: Tree, path: str, notes: Notes) -> Iterator[tuple[int, bytes]]:
    """Yield where each record begins, and its bytes; what follows damage is lost, for nothing says where the next record begins."""
    size = tree.files[path]
    try:
        with tree.open(path) as file:
            at = 0
            while at < size:
                file.seek(at)
                data = _read(file.read(_HEAD.size), size - at, file)
                yield at, data
                at += _HEAD.size + len(data) + _FOOT.size
    except (OSError, UnreadableError) as error:
        notes.lose(f"a file is damaged or cut off, and the rest of it is lost: {error}", path)


def record(tree: Tree, path: str, at: int) -> bytes:
    """Return the bytes of the record that begins at ``at``.

    Raises:
        UnreadableError: it is damaged.
        OSError: the file cannot be read.
    """
    with tree.open(path) as file:
        file.seek(at)
        return _read(file.read(_HEAD.size), tree.files[path] - at, file)


def _read(head: bytes, left: int, file: object) -> bytes:
    if len(head) < _HEAD.size:
        raise UnreadableError("a record is cut off")
    length, check = _HEAD.unpack(head)
    if masked(head[:8]) != check:
        raise UnreadableError("the checksum of a record's length is wrong")
    if length > left - _HEAD.size - _FOOT.size:
        raise UnreadableError(f"a record claims {length:,} bytes beyond the file's end")
    data: bytes = file.read(length)  # type: ignore[attr-defined]
    foot = file.read(_FOOT.size)  # type: ignore[attr-defined]
    if len(foot) < _FOOT.size or masked(data) != _FOOT.unpack(foot)[0]:
        raise UnreadableError("the checksum of a record is wrong")
    return data


def masked(data: bytes) -> int:
    """Return the checksum as it is written."""
    import google_crc32c

    check = int(google_crc32c.value(data))
    return (((check >> 15) | (check << 17)) + MASK) & 0xFFFFFFFF


def is_record_file(head: bytes) -> bool:
    """Tell whether the first bytes of a file are the head of a record."""
    return len(head) >= _HEAD.size and masked(head[:8]) == _HEAD.unpack(head[: _HEAD.size])[1]
