"""How numbers and foreign text are written, the same in every format.

sci(2.1e-1)      2.1e-1        times(3.5e6)   3.5e6 x
sci(3e-8)        3e-8          times(41.2)    41 x
number(0.1234)   0.1234        number(1e-9)   1.00e-9
clean("a\\x1b[2J")  a\\x1b[2J     (the escape is spelled out, the terminal does not obey it)
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Sequence

ELLIPSIS = "…"
INSTALLED = ("site-packages", "dist-packages", "/lib/python3.", "<frozen ")
"""What the path of a file has in it that nobody edits: an installed library's, or the interpreter's own."""


def say(text: str) -> None:
    """Tell the user on stderr in one write: `print` writes the end apart under PYTHONUNBUFFERED, and another line comes between."""
    sys.stderr.write(f"trueup: {text}\n")
    sys.stderr.flush()


def sci(value: float) -> str:
    """Write an error with two significant digits, ``2.1e-1``; zero is ``0``."""
    if not math.isfinite(value):
        return _not_finite(value)
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def times(ratio: float) -> str:
    """Write how many times one thing is another: ``1.8 x``, ``41 x``, ``1,234 x``, ``3.5e6 x``."""
    if not math.isfinite(ratio) or ratio >= 1e4 or 0 < ratio < 0.1:
        return f"{sci(ratio)} x"
    return f"{ratio:.1f} x" if ratio < 10 else f"{ratio:,.0f} x"


def percent(share: float) -> str:
    """Write a share or a relative distance as a person says it: ``2.7 %``, ``0.0079 %``, ``1,200 %``, ``under 0.0001 %``."""
    if not math.isfinite(share):
        return "infinitely"
    percents = 100 * share
    if 0 < percents < 1e-4:
        return "under 0.0001 %"
    if percents >= 1e9:
        return "over 1,000,000,000 %"
    return f"{percents:,.0f} %" if percents >= 9.95 else f"{percents:.2g} %"


def number(value: float, digits: int = 4) -> str:
    """Write a value of a tensor with ``digits`` significant digits, as short as it stays exact to them."""
    if not math.isfinite(value):
        return _not_finite(value)
    if value == 0:
        return "0"
    rounded = f"{value:.{digits - 1}e}"
    power = int(rounded.split("e")[1])
    if -3 <= power <= digits:
        return f"{value:.{max(0, digits - 1 - power)}f}"
    mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 call``, ``1,234 calls``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def clean(text: str) -> str:
    """Spell out control, bidirectional and unassigned characters, so that captured text cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() or unicodedata.category(c) == "Zs" else _spelled(c) for c in text)


def one_line(text: str) -> str:
    """``clean``, on one line."""
    return clean(text).replace("\n", "\\n")


def first_line(error: BaseException, most: int = 200) -> str:
    """Return the first line of what an exception says, its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:most]


def shorten(text: str, width: int) -> str:
    """Cut the middle out of a text that is longer than ``width``: both ends of a scope or an operator matter."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return text[:head] + ELLIPSIS + text[len(text) - (width - 1 - head) :]


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"


def own_frame(source: str, stack: Sequence[str]) -> str:
    """Return the innermost frame of a stack that is the user's own code, ``source`` where none is."""
    return next((frame for frame in stack if not any(folder in frame for folder in INSTALLED)), source)


def user_source(source: str, stack: Sequence[str]) -> str:
    """Say where a call stands in the user's own code (``source``), and by its stack through which library it went from there."""
    own = own_frame(source, stack)
    return short_source(source) if own == source else f"{short_source(own)}, through {short_source(source)}"


def is_own(source: str | None) -> bool:
    """Tell of what `user_source` says whether the user's own code makes the call, and no library that it went through."""
    return bool(source) and ", through " not in str(source)


def short_source(source: str) -> str:
    """Keep the file and its folder of ``/long/path/folder/file.py:12 in function``; reports show the whole path elsewhere."""
    place, _, function = source.rpartition(" in ")
    if not place:
        return one_line(source)
    return one_line("/".join(place.replace("\\", "/").split("/")[-2:]) + f" in {function}")


def call_name(scope: str, op: str, ordinal: int) -> str:
    """Name a call in one line: ``neck.lstm/torch.lstm#0``."""
    return one_line(f"{scope}/{op}#{ordinal}" if scope else f"{op}#{ordinal}")


def unified_diff(before: Sequence[str], after: Sequence[str], name: str) -> str:
    """Write the change of a file's lines, each with its end, as a patch that ``git apply`` takes; a last line may have no end."""
    import difflib  # few write a patch

    parts = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(part if part.endswith("\n") else part + "\n\\ No newline at end of file\n" for part in parts)


def in_runs(numbers: list[int], between: str = ",") -> str:
    """Write numbers as they stand, runs as first and last: ``0-3,7``. A group of 512 ranks stays readable."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return between.join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
