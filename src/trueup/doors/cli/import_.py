"""``trueup import DIR -o CAPTURE``: make a capture of what another tool dumped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.foundation.model import TrueupError

FORMATS = "msprobe, ptdbg, padiff, hdf5, tfdbg2, tfdbg, tensorflow, arrays"


def import_(
    source: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="Folder of the dump, or one file of it.")],
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates it on Python 3.10
        typer.Option("--output", "-o", metavar="CAPTURE", show_default=False, help="Where the capture goes."),
    ] = None,
    format: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FORMAT", show_default=False, help=f"{FORMATS}; else told by content."),
    ] = None,
) -> int:
    """Import a dump of msprobe, ptdbg, PaDiff, torch.utils.dumper or tfdbg, or a folder of arrays."""
    if output is None:
        raise TrueupError(
            "There is no place for the capture.\n  expected: -o CAPTURE\n  got:      none\n"
            "  next:     trueup import dump/ -o runs/imported"
        )

    from rich.markup import escape

    from trueup.doors.cli.terminal import Terminal
    from trueup.exchange.readers import import_dump
    from trueup.foundation.words.wording import clean

    imported = import_dump(source, output, format=format)
    Terminal(soft_wrap=True).print(escape(clean(str(imported))))
    return 0
