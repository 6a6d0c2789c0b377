"""Dumps of other tools, made into captures: one file for each format, behind the interface in ``dump``.

``import_dump`` is all that others call. Readers import no framework but PyTorch, for .pt files, and believe nothing that a dump
says: no path out of its folder, no size, no pickle.
"""

from trueup.exchange.readers.importing import Imported, import_dump

__all__ = ["Imported", "import_dump"]
