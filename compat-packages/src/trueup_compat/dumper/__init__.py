"""``torch.utils.dumper`` of Ascend's PyTorch 1.5 and 1.8 over Trueup, and the comparison of its HDF5 files.

    from trueup_compat.dumper import dumper

    with dumper(use_dump=True, dump_path="./model_gpu.h5"):
        loss = model(x); loss.backward()

`session` is the context manager, `hdf5` writes the files, `comparing` compares two (``python -m trueup_compat.dumper compare``),
`extracting` takes operators out of one. What differs from the tool is in docs/compat.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup_compat.dumper.comparing import compare as compare
    from trueup_compat.dumper.extracting import extract as extract
    from trueup_compat.dumper.session import dumper as dumper
    from trueup_compat.dumper.session import install as install

_HOMES = {"compare": "comparing", "dumper": "session", "extract": "extracting", "install": "session"}

__all__ = ["compare", "dumper", "extract", "install"]


def __getattr__(name: str) -> Any:
    """Load what is asked for: the comparison needs no PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trueup_compat.dumper' has no attribute {name!r}")
    return getattr(import_module(f"trueup_compat.dumper.{_HOMES[name]}"), name)
