"""The prompt of ``python -m ptdbg_ascend.parse``: ``Parse >>> vc``, ``cn``, ``pt``, ``pk``; any other word is a shell command.

A command's code is that of `trueup diff`: 0 alike, 1 not, 2 could not tell. Lines that are piped in are run one after the other.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.main import get_command

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import clean, one_line

Word = Optional[str]  # noqa: UP045 - typer evaluates it on Python 3.10
PROMPT = "Parse >>> "
DATA = Path("parse_data")
"""Where the tool leaves what it converts."""
SHOWN = 128
"""Elements that ``pt`` prints."""
USAGE_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ in ("ClickException", "UsageError")
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def vc(
    mine: Annotated[Path, typer.Option("-m", "--my_dump_path", metavar="DIR", help="Of the NPU.")],
    golden: Annotated[Path, typer.Option("-g", "--golden_dump_path", metavar="DIR", help="Of the benchmark.")],
    output: Annotated[Path, typer.Option("-out", "--output_path", metavar="DIR", help="Where the table goes.")] = Path(),
    tool: Annotated[Word, typer.Option("-cmp_path", "--msaccucmp_path", hidden=True)] = None,  # noqa: ARG001 - of CANN's tool
) -> int:
    """Compare two folders of .npy files or of kernel dumps, name by name."""
    from trueup_compat.ptdbg_ascend.batch import compare_folders

    found = compare_folders(mine, golden, output)
    typer.echo(found.sentence)
    return found.exit_code


@app.command()
def cn(
    mine: Annotated[str, typer.Option("-m", "--my_dump_path", metavar="NPY", help="Of the NPU.")],
    golden: Annotated[str, typer.Option("-g", "--golden_dump_path", metavar="NPY", help="Of the benchmark.")],
    top: Annotated[int, typer.Option("-p", "--print", metavar="N", min=1, help="How many of the worst elements.")] = 20,
    absolute: Annotated[float, typer.Option("-al", "--atol", metavar="X", min=0.0, help="|m - g| <= X + rtol |g|.")] = 0.001,
    relative: Annotated[float, typer.Option("-rl", "--rtol", metavar="X", min=0.0, help="Likewise.")] = 0.001,
    save: Annotated[bool, typer.Option("-s", "--save", help="Write both as text, too.")] = False,
) -> int:
    """Compare two .npy files element by element."""
    from trueup.analysis.selecting import Selection
    from trueup.doors.report.capture_view import Address, operand
    from trueup.doors.report.diff import compare_tensors, render_diff
    from trueup.doors.report.terminal import Terminal
    from trueup.foundation.kernels.metrics import Tolerance

    bench, npu = (operand(Address(Path(path)), Selection(Path())) for path in (golden, mine))
    found = compare_tensors(bench, npu, Tolerance(relative, absolute), top)
    render_diff(found, Terminal())
    for path in (golden, mine) if save else ():
        typer.echo(f"wrote {_written(Path(path))}")
    return found.exit_code


@app.command()
def pt(name: Annotated[Path, typer.Option("-n", "--path", metavar="NPY", help="The file.")]) -> int:
    """Print shape, dtype, max, min, mean and the first elements of a .npy file, and write them all as text."""
    import numpy as np

    from trueup.doors.report.capture_view import read_npy

    array = read_npy(name)
    typer.echo(f"shape: {list(array.shape)}  dtype: {array.dtype.name}")
    if array.size and array.dtype.kind in "biuf":
        with np.errstate(all="ignore"):
            typer.echo(f"max: {array.max()}  min: {array.min()}  mean: {array.mean(dtype=np.float64)}")
    first = array.reshape(-1)[:SHOWN]
    for start in range(0, len(first), 8):
        typer.echo("  ".join(f"{value:>13.6g}" if array.dtype.kind == "f" else str(value) for value in first[start : start + 8]))
    if array.size > SHOWN:
        typer.echo(f"and {array.size - SHOWN:,} more")
    typer.echo(f"wrote {_written(name)}")
    return 0


@app.command()
def pk(
    file: Annotated[Path, typer.Option("-f", "--file", metavar="PKL", help="A dump's dump.pkl.")],
    name: Annotated[str, typer.Option("-n", "--name", metavar="PREFIX", help="What the rows begin with.")],
) -> int:
    """Print the rows of a dump.pkl, with their stacks."""
    from trueup_compat.ptdbg_ascend.parsing import parse

    parse(file, name)
    return 0


@app.command()
def cad(
    folder: Annotated[Path, typer.Option("-m", "--my_dump_path", metavar="DIR", help="Dumps of kernels.")],
    output: Annotated[Path, typer.Option("-out", "--output_path", metavar="DIR", help="Where the .npy go.")] = DATA,
    tool: Annotated[Word, typer.Option("-asc", "--ascend_path", hidden=True)] = None,  # noqa: ARG001 - of CANN's tool
) -> int:
    """Write the tensors of a folder of kernel dumps as .npy files."""
    return _converted(folder, output)


@app.command()
def dc(
    name: Annotated[Path, typer.Option("-n", "--name", metavar="FILE", help="A dump of a kernel.")],
    layout: Annotated[str, typer.Option("-f", "--format", metavar="NCHW", help="Order of the axes; else the device's.")] = "",
    output: Annotated[Path, typer.Option("-out", "--output_path", metavar="DIR", help="Where the .npy go.")] = DATA,
    tool: Annotated[Word, typer.Option("-cmp_path", "--msaccucmp_path", hidden=True)] = None,  # noqa: ARG001 - of CANN's tool
) -> int:
    """Write the tensors of a kernel dump as .npy files."""
    return _converted(name, output, layout)


def _converted(source: Path, output: Path, layout: str = "") -> int:
    from trueup.exchange.readers.kernel_dump import TARGETS
    from trueup.foundation.words.wording import counted
    from trueup_compat.dumper.converting import Wish, convert

    if layout and layout not in TARGETS:
        raise TrueupError(f"-f is refused.\n  expected: {', '.join(TARGETS)}\n  got:      {layout}")
    if not source.exists():
        raise TrueupError(f"There is nothing to convert.\n  where:    {source}\n  expected: dumps of kernels\n  got:      none")
    written, said = convert(source, output, wish=Wish(layout or None))
    typer.echo("\n".join([*said, f"{counted(written, 'tensor')} in {output}"]))
    return 0


@app.command("help")
def help_() -> int:
    """List the commands."""
    for name, command in _commands().items():
        if not command.hidden:
            typer.echo(f"{name:<6}{(command.help or '').partition(chr(10))[0]}")
    typer.echo("exit  Leave. Any other word is a command of your shell; COMMAND -h says what one takes.")
    return 0


def execute(line: str) -> int:
    """Run a line.

    Raises:
        TrueupError: it cannot be read, or its command failed.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise TrueupError(f"the line cannot be read: {error}\n  got:      {one_line(line)}\n  next:     close the quote") from None
    if not words:
        return 0
    if words[0] not in _commands():
        return _run(line.strip().removeprefix("run "))
    try:
        code = get_command(app)(
            args=words, prog_name="Parse >>>", standalone_mode=False, help_option_names=["-h", "--help"]
        )
    except USAGE_ERRORS as error:
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        raise TrueupError(f"{said}\n  got:      {one_line(line)}\n  next:     {words[0]} -h") from None
    return code if isinstance(code, int) else 0


def main() -> None:
    """Read lines until ``exit`` or the end of the input; the exit code is the worst of piped lines, 0 of typed ones."""
    worst = 0
    for line in _lines():
        if line.strip() in ("exit", "quit"):
            break
        try:
            worst = max(worst, execute(line))
        except TrueupError as error:
            _complain(clean(str(error)))
            worst = 2
    sys.exit(0 if sys.stdin.isatty() else worst)


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        for line in sys.stdin:  # `yield from` would close it
            yield line.strip()
        return
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            return
        except KeyboardInterrupt:
            print()


def _commands() -> dict[str, Any]:
    return dict(get_command(app).commands)  # type: ignore[attr-defined]


def _run(command: str) -> int:
    """Run a command of the user's shell, as the tool does with any word that it does not know."""
    sys.stdout.flush()
    code = subprocess.run(command, shell=True, check=False).returncode
    if code:
        _complain(f"the shell command ended with {code}: {one_line(command)}")
    return 2 if code else 0


def _complain(said: str) -> None:
    sys.stdout.flush()
    print(f"trueup: {said}", file=sys.stderr, flush=True)


def _written(path: Path) -> Path:
    """Write the elements of a file as text, eight in a line, into ``parse_data``."""
    from trueup.doors.report.capture_view import read_npy
    from trueup.doors.report.saving import replaced

    target = DATA / f"{path.name}.txt"
    flat = read_npy(path).reshape(-1)
    with replaced(target, "a file for the elements") as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(_text(flat))
    return target


def _text(flat: Any) -> Iterable[str]:
    for start in range(0, flat.size, 8):
        yield " ".join(map(str, flat[start : start + 8].tolist())) + "\n"
