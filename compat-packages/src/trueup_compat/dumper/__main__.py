"""``python -m trueup_compat.dumper compare -m MY.h5 -g GOLDEN.h5``; exit codes as those of ``trueup compare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trueup.exchange.readers.kernel_dump import TARGETS
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
    source: Annotated[str, typer.Option("-d", "--dump_file", metavar="FILE|DIR[,...]", help="Dumps of kernels, or a folder.")],
    out: Annotated[Path, typer.Option("-out", "--output", "--out", metavar="DIR", help="Where the files go.")] = Path(),
    version: Annotated[int, typer.Option("-v", "--version", min=1, max=2, help="1: one protobuf; 2: the bytes lie behind.")] = 2,
    layout: Annotated[str, typer.Option("-f", "--format", help=f"Order of the axes: {', '.join(TARGETS)}.")] = "",
    shape: Annotated[str, typer.Option("-s", "--shape", metavar="1,3,224,224", help="With -f: sizes without padding.")] = "",
    put: Annotated[int, typer.Option("-i", "--input_tensor", min=-1, metavar="N", help="This input alone.")] = -1,
    output: Annotated[int, typer.Option("-o", "--output_tensor", min=-1, metavar="N", help="This output alone.")] = -1,
    kind: Annotated[str, typer.Option("-t", "--type", help="npy, or bin: bare bytes.")] = "npy",
    script: Annotated[str, typer.Option("-c", "--custom_script_path", hidden=True)] = "",
) -> None:
    """Write each tensor of kernel dumps as a NumPy file."""
    from trueup.foundation.words.wording import counted
    from trueup_compat.dumper.converting import Wish
    from trueup_compat.dumper.converting import convert as convert_dumps

    for option, got, wanted in (("-f", layout or "ND", TARGETS), ("-t", kind, ("npy", "bin")), ("-c", script, ("",))):
        if got not in wanted:
            expected = ", ".join(wanted) or "no script, none is run"
            raise TrueupError(f"{option} is refused.\n  expected: {expected}\n  got:      {got}")
    sizes = tuple(int(size) for size in shape.split(",") if size.isdecimal())
    if shape and (len(sizes) != len(shape.split(",")) or 0 in sizes or not layout):
        raise TrueupError(f"-s is refused.\n  expected: sizes such as 1,3,224,224, beside -f\n  got:      {shape}")
    if put >= 0 and output >= 0:
        raise TrueupError("-i and -o name one tensor: leave one of them out")
    sources = [Path(one) for one in source.split(",")]
    for one in sources:
        if not one.exists():
            raise TrueupError(f"There is nothing to convert.\n  where:    {one}\n  expected: a dump, or a folder\n  got:      none")
    slot = f"input.{put}" if put >= 0 else f"output.{output}" if output >= 0 else None
    written, said = convert_dumps(sources, out, version=version, wish=Wish(layout or None, sizes, slot, kind == "bin"))
    typer.echo("\n".join([*said, f"{counted(written, 'tensor')} in {out}"]))


@app.command("file_compare")
def file_compare(
    mine: Annotated[Path, typer.Option("-m", metavar="NPY", help="My tensor.")],
    golden: Annotated[Path, typer.Option("-g", metavar="NPY", help="The golden tensor.")],
    out: Annotated[Path, typer.Option("-out", "--output", metavar="DIR", help="Where the table goes.")] = Path(),
) -> None:
    """Measure two NumPy files in msaccucmp's columns; exit code 0 if they are equal."""
    from trueup_compat.dumper.comparing import compare_arrays

    table, rows, equal = compare_arrays(mine, golden, out)
    typer.echo("\n".join([*(f"{name:<25} {value}" for name, value in rows if value != ""), f"table: {table}"]))
    raise typer.Exit(0 if equal else 2 if equal is None else 1)


def main() -> None:
    """Run; an error is one message and exit code 2."""
    try:
        app()
    except TrueupError as error:
        typer.echo(f"trueup: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
