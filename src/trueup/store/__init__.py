"""The capture directory, format 1: its layout, its columns, how it is written and how it is read.

A recorder makes a ``Writer`` on the rank that ``claim`` gives it; everybody else calls ``open_capture``. No framework
is imported here, and nothing that is read is trusted. docs/format.md says the same for readers without this package.
"""

from trueup.store.layout import FORMAT_VERSION
from trueup.store.ownership import Displaced, claim
from trueup.store.reader import Capture, open_capture
from trueup.store.schema import RECORDS, sketch_matrix, statistics, table
from trueup.store.writer import Writer, write_process

__all__ = [
    "FORMAT_VERSION", "RECORDS", "Capture", "Displaced", "Writer", "claim", "open_capture", "sketch_matrix",
    "statistics", "table", "write_process",
]  # fmt: skip
