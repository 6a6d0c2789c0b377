"""A port changes the bytes of its edits and no others: scripts of PyTorch and of Python, however they are written."""

from __future__ import annotations

import ast
import io
import re
import sysconfig
import tokenize
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trueup.foundation.model import TrueupError
from trueup.migration.port import port, undo
from trueup.migration.port.flow import Project
from trueup.migration.port.porting import _changed, rewritten
from trueup.migration.port.reading import Script
from trueup.migration.port.rules import Own, Rules, builtin
from trueup.migration.port.writing import Writer

WAYS: dict[str, Callable[[bytes], bytes]] = {
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "CR": lambda data: data.replace(b"\n", b"\r"),
    "tabs": lambda data: re.sub(rb"^(?:    )+", lambda found: b"\t" * (len(found.group()) // 4), data, flags=re.MULTILINE),
    "form feeds": lambda data: re.sub(rb"^(?=def |class )", b"\f", data, flags=re.MULTILINE),
    "backslashes": lambda data: re.sub(rb"^( +\w+) = (?=\w)", rb"\1 = \\\n   ", data, flags=re.MULTILINE),
    "brackets": lambda data: re.sub(rb"^( +return) ([^#\n(]+)$", rb"\1 ((  # (why\n   \2 ) )", data, flags=re.MULTILINE),
    "no last line end": lambda data: data.rstrip(b"\n"),
    "latin-1": lambda data: ("# coding: latin-1\n# \xe9 \xff\n" + data.decode("ascii")).encode("latin-1"),
    "gbk": lambda data: ("# coding: gbk\n# 训练\n" + data.decode("ascii")).encode("gbk"),
    "a mark": lambda data: b"\xef\xbb\xbf# \xc3\xa9\n" + data,
}
"""How a script may be written otherwise, in the order in which two of them go together."""
FOLDERS = (Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib")))
NOTHING = msgspec.structs.replace(builtin(), name=(), switch=(), sink=(), left=(), similar=(), known={}, variable={})


def public(folder: Path, every: int) -> list[Path]:
    """Return scripts of a folder in no order of their names, those with the letters first."""
    files = sorted(path for path in folder.rglob("*.py") if path.stat().st_size < 30_000 and "test" not in path.parts)[::every]
    return [path for path in files if path.read_bytes().isascii()]


FILES = (
    public(FOLDERS[0] / "cuda", 1) + public(FOLDERS[0] / "nn", 5) + public(FOLDERS[1] / "json", 1) + public(FOLDERS[1] / "email", 3)
)


def written(script: Script, rules: Rules, to: str) -> Writer:
    return Writer(Project([script], rules), script, to, Own())


def check(path: Path, data: bytes) -> int:
    """Hold a script against what a port promises of its text; return how many edits there were, -1 if it is no Python."""
    try:
        script = Script(path, data, path.stem)
    except TrueupError:
        return -1
    assert script.encoded(script.data) == data
    assert script.encoded("".join(script.lines).encode()) == data.removeprefix(b"\xef\xbb\xbf")
    for node in script.scopes:
        places(script, node)
    nothing = written(script, NOTHING, "npu")
    assert (nothing.text, nothing.edits) == (data, [])
    count = 0
    for to in ("npu", "agnostic"):
        writer = written(script, builtin(), to)
        changed = _changed(writer, path.parent)
        assert rewritten(data, changed.changes) == writer.text
        for before, after in zip(writer.edits, writer.edits[1:], strict=False):
            assert before.end <= after.start
        assert comments(writer.text) == comments(data)
        again = Script(path, writer.text, path.stem)
        assert again.newline == script.newline
        assert (again.data.count(b"\r"), again.data.count(b"\n")) >= (script.data.count(b"\r"), script.data.count(b"\n"))
        assert not written(again, builtin(), to).edits, "a second port changes nothing"
        count += len(writer.edits)
    return count


def places(script: Script, node: ast.AST) -> None:
    """A node's bytes are what it says."""
    if isinstance(node, ast.Name):
        assert script.text(node) == node.id or node in script.misplaced
    elif isinstance(node, ast.Attribute):
        assert script.text(node).endswith(node.attr) or node in script.misplaced
    elif isinstance(node, ast.Constant) and isinstance(node.value, (str, int)) and isinstance(script.parents[node], ast.Call):
        assert ast.literal_eval(f"({script.text(node)}\n)") == node.value or node in script.misplaced
    elif isinstance(node, ast.Call) and node not in script.misplaced and not script.within(node, ast.JoinedStr):
        given = [script.data[start:end].decode() for start, end in script.arguments(node)]
        assert len(given) == len(node.args) + len(node.keywords)
        if not any(isinstance(one, ast.GeneratorExp) for one in node.args):
            assert (
                ast.dump(ast.parse(f"f({', '.join(one + chr(10) for one in given)})").body[0].value.func)
                == "Name(id='f', ctx=Load())"
            )  # type: ignore[attr-defined]
            assert script.data[script.behind_arguments(node) : script.span(node)[1]].strip().endswith(b")")


def comments(data: bytes) -> list[str]:
    text = data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])
    lines = io.StringIO(re.sub(r"\r\n?", "\n", text))
    return [one.string for one in tokenize.generate_tokens(lines.readline) if one.type == tokenize.COMMENT]


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(FILES), st.lists(st.sampled_from(list(WAYS)), max_size=2, unique=True))
def test_a_port_touches_its_own_bytes_alone(path: Path, ways: list[str]) -> None:
    data = path.read_bytes()
    for name in WAYS:
        if name in ways and data.isascii():
            data = WAYS[name](data)
    check(path, data)


@pytest.mark.parametrize("encoding", ["latin-1", "gbk", "cp1251", "utf-8"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_script_keeps_its_encoding_and_line_ends(tmp_path: Path, encoding: str, newline: str) -> None:
    said = {"latin-1": "é", "gbk": "训练", "cp1251": "шаг", "utf-8": "训é"}[encoding]
    lines = [f"# coding: {encoding}", f"# {said}", "import torch", f"x = torch.ones(2); s = '{said}'; y = x.cuda()  # {said}"]
    source = tmp_path / "train.py"
    source.write_bytes(newline.join(lines).encode(encoding))
    result = port(source, tmp_path / "out", to="npu")
    new = [*lines[:3], "import torch_npu", lines[3].replace("cuda", "npu")]
    assert (tmp_path / "out" / "train.py").read_bytes() == newline.join(new).encode(encoding)
    assert [line for line, _, _ in result.changed[0].lines] == [4]
    assert undo(tmp_path / "out") == (2, ())
    assert (tmp_path / "out" / "train.py").read_bytes() == source.read_bytes()


def test_what_an_encoding_lacks_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes("# coding: latin-1\nimport torch\nload('é')\n".encode("latin-1"))
    (tmp_path / "rules.json").write_text(
        '{"rules": {"ArgsModifyRule": [{"func_name": "load", "arg_idx": 0, "arg_new": "\\"训\\""}]}}'
    )
    result = port(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", rules=tmp_path / "rules.json")
    assert result.unread == (
        f"{tmp_path / 'train.py'}: what was to be written has '训', which iso-8859-1 lacks: save it as UTF-8 first",
    )
    (tmp_path / "train.py").write_bytes(b"# coding: ascii\nimport torch\n# \xe9\n")
    with pytest.raises(TrueupError, match="says it is ascii, and its bytes are not"):
        port(tmp_path / "train.py")
