"""``python -m trueup_compat.dumper compare -m MY.h5 -g GOLDEN.h5``; exit codes as those of ``trueup compare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trueup.foundation.model import TrueupError

ABOUT = "Compare files of torch.utils.dumper, take some of one, convert dumps of kernels."
app = typer.Typer(add_completion=False, no_args_is_help=True, help=ABOUT)


@app.command()
def compare(
    mine: Annotated[Path, typer.Option("-m", metavar="H5", help="My dump: of the device under suspicion.")],
    golden: Annotated[Path, typer.Option("-g", metavar="H5", help="The golden dump.")],
    out: Annotated[Path, typer.Option("-out", "--out", metavar="DIR", help="Where the table goes.")] = Path(),
) -> None:
    """Write a row for each tensor, in msaccucmp's columns, and print the verdict."""
    from trueup_compat.dumper.comparing import compare as compare_files

    table, result = compare_files(mine, golden, out)
    typer.echo(f"{result}\ntable: {table}")
    raise typer.Exit(result.exit_code)


@app.command()
def extract(
    source: Annotated[Path, typer.Option("-i", metavar="H5", help="The file.")],
    target: Annotated[Path, typer.Option("-o", metavar="H5", help="The file that is made, or added to.")],
    group: Annotated[list[str], typer.Option("-s", metavar="/op/seqid/", help="An operator; may be repeated.")],
    into: Annotated[list[str] | None, typer.Option("-d", metavar="/op/seqid/", help="The same again, as h5copy has it.")] = None,
    _parents: Annotated[bool, typer.Option("-p", help="As h5copy: without effect, groups are always made.")] = False,
    _verbose: Annotated[bool, typer.Option("-v", help="As h5copy: without effect.")] = False,
) -> None:
    """Take operators out of a file."""
    if into and [one.strip("/") for one in into] != [one.strip("/") for one in group]:
        raise TrueupError(f"an operator keeps its name: expected -d {' -d '.join(group)}, got {' -d '.join(into)}")
    from trueup.foundation.words.wording import counted
    from trueup_compat.dumper.extracting import extract as extract_from

    typer.echo(f"{counted(extract_from(source, target, group), 'operator')} copied into {target}")


@app.command()
def convert(
    source: Annotated[Path, typer.Option("-d", metavar="FILE|DIR", help="A dump of a kernel, or a folder of them.")],
    out: Annotated[Path, typer.Option("-out", "--out", metavar="DIR", help="Where the NumPy files go.")] = Path(),
    version: Annotated[int, typer.Option("-v", min=1, max=2, help="1: files that are one protobuf; 2: with the bytes behind.")] = 2,
) -> None:
    """Write each tensor of kernel dumps as a NumPy file."""
    from trueup.foundation.words.wording import counted
    from trueup_compat.dumper.converting import convert as convert_dumps

    if not source.exists():
        raise TrueupError(f"There is nothing to convert.\n  where:    {source}\n  expected: a dump, or a folder\n  got:      none")
    written, said = convert_dumps(source, out, version=version)
    typer.echo("\n".join([*said, f"{counted(written, 'tensor')} in {out}"]))


def main() -> None:
    """Run; an error is one message and exit code 2."""
    try:
        app()
    except TrueupError as error:
        typer.echo(f"trueup: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
