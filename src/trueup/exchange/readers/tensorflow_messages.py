"""Protocol buffers of TensorFlow's debuggers, read without TensorFlow: a table of their fields, made into classes by ``protobuf``.

A message takes memory in proportion to its file: fields that the table lacks stay bytes. Messages beyond `MOST` are refused.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

from trueup.exchange.readers.dump import UnreadableError
from trueup.foundation import toml
from trueup.foundation.model import TrueupError

MOST = 1 << 30
"""Bytes of a message; protobuf itself ends at 2 GiB."""
PACKAGE = "trueup.tensorflow"


def parse(message: str, data: bytes) -> Any:
    """Read a message of ``tensorflow_messages.toml``.

    Raises:
        UnreadableError: the bytes are none, or too many.
        TrueupError: ``protobuf`` is not installed.
    """
    if len(data) > MOST:
        raise UnreadableError(f"a message of {len(data):,} bytes is larger than {MOST:,}")
    found = _classes()[message]()
    try:
        found.ParseFromString(data)
    except Exception as error:  # noqa: BLE001 - DecodeError is another class in each implementation of protobuf
        raise UnreadableError(f"it is no {message}: {str(error)[:80]}") from None
    return found


def text(value: bytes) -> str:
    """Return text as protobuf holds it."""
    return value.decode("utf-8", "replace")


def require(what: str) -> None:
    """Say what is to be installed, where it is not.

    Raises:
        TrueupError: ``protobuf`` or ``google-crc32c`` is missing.
    """
    if any(importlib.util.find_spec(name) is None for name in ("google", "google.protobuf", "google_crc32c")):
        raise TrueupError(
            f"{what} is a dump of TensorFlow's debugger: install what reads it (not TensorFlow), pip install 'trueup[tfdbg]'"
        )


@cache
def _classes() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="trueup_tensorflow.proto", package=PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    table = toml.packaged(__package__, "tensorflow_messages.toml")
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.removesuffix("[]")
            added = message.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if kind.endswith("[]") else kinds.LABEL_OPTIONAL
            if plain[0].isupper():
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{plain}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in table}
