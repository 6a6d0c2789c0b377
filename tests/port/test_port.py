"""`trueup port`: what must change, what must not, and that what is written runs and trains the same."""

from __future__ import annotations

import ast
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import trueup
from port.cases import CASES
from trueup.comparison.result.comparing import compare
from trueup.doors.cli import main
from trueup.foundation.frameworks import cuda_version
from trueup.foundation.model import TrueupError
from trueup.migration.port import port, proving, undo
from trueup.migration.port.rules import builtin
from trueup_compat.ms_fmk_transplt import words_of

HERE = Path(__file__).parent
TARGETS = ("npu", "agnostic")
HEAD = "import functools\nimport os\nimport torch\n"


def ported(tmp_path: Path, text: str, to: str, also: Iterable[str] = ()) -> str:
    source = tmp_path / "train.py"
    source.write_bytes(text.encode())
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    port(source, tmp_path / "out", to=to, also=also)  # type: ignore[arg-type]
    return (tmp_path / "out" / "train.py").read_bytes().decode()


ASKS = (
    "kind = str(x.device)", "y = x.device.type", "y = (x.device.type)", "y = x.type()", "y = 'cuda' in",
    "y = str(x.device).starts", "os.environ['CUDA",
    "match x.device.type", "def f(d):\n    return {",
)  # fmt: skip
"""Beginnings of cases that only ask about a device, which import nothing for it."""


def expected(before: str, after: str, to: str) -> str:
    return HEAD + ("import torch_npu\n" if to == "npu" and not before.startswith(ASKS) else "") + after + "\n"


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].replace("\n", "; ")[:60])
def test_what_must_change(tmp_path: Path, case: tuple[str, str, str], to: str) -> None:
    before, after = case[0], case[1 + TARGETS.index(to)]
    new = ported(tmp_path, f"{HEAD}{before}\n", to)
    if after == before:
        assert new == f"{HEAD}{before}\n"
    else:
        assert new == expected(before, after, to)
    ast.parse(new)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("rule", [*builtin().name, *builtin().switch, *builtin().similar], ids=lambda rule: rule.id)
def test_the_example_of_a_rule(tmp_path: Path, rule: object, to: str) -> None:
    before, after = rule.example[0], builtin().target[to].fill(rule.example[1 + TARGETS.index(to)])  # type: ignore[attr-defined]
    head = "import torch\nimport apex.normalization\n"
    new = ported(tmp_path, f"{head}{before}\n", to, ["similar"] if rule in builtin().similar else ())
    assert new.replace("import torch_npu\n", "") == f"{head}{after}\n"
    assert ("import torch_npu" in new) == (to == "npu" and before != after)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ["traps.txt", "traps_of_flow.txt", "traps_of_names.txt"])
def test_letters_alone_change_nothing(tmp_path: Path, name: str, to: str) -> None:
    source = tmp_path / "traps.py"
    shutil.copy(HERE / name, source)
    result = port(source, tmp_path / "out", to=to)  # type: ignore[arg-type]
    assert (tmp_path / "out" / "traps.py").read_bytes() == source.read_bytes()
    assert result.changes == 0
    assert len({one.line for one in result.seen}) >= 60
    lines = source.read_text().splitlines()
    listed = {one.line for one in result.seen}
    inside = set(range(37, 40)) if name == "traps.txt" else set()  # a text of several lines is listed once
    missed = [n for n, line in enumerate(lines, 1) if "cuda" in line.lower() and n not in listed | inside]
    assert missed == []


def test_torch_under_a_name_of_the_scripts_own(tmp_path: Path) -> None:
    head, text = (
        "import torch as th\n",
        "from torch.cuda.amp import autocast\nx = th.ones(2).cuda() if th.cuda.is_available() else f(th.cuda)\n",
    )
    new = ported(tmp_path, head + text, "npu")
    after = "from torch.amp import autocast\nx = th.ones(2).npu() if th.npu.is_available() else f(th.cuda)\n"
    assert new == f"{head}import torch_npu\n{after}"
    assert "th.accelerator.is_available()" in ported(tmp_path, head + text, "agnostic")


def test_torch_comes_with_all_names_of_a_module(tmp_path: Path) -> None:
    text = "import torch.nn as nn\nfrom tools import *\nif torch.cuda.is_available():\n    m = nn.Linear(2, 2).cuda()\n"
    assert ported(tmp_path, text, "agnostic") == text.replace(".cuda.is", ".accelerator.is").replace(
        ".cuda()", ".to(torch.accelerator.current_accelerator())"
    )
    assert "torch.npu.is_available()" in ported(tmp_path, text, "npu")
    bound = "torch = 1\nfrom tools import *\nimport torch.nn\n"
    assert ported(tmp_path, f"{bound}def f(torch):\n    torch.cuda.synchronize()\n", "npu").endswith("torch.cuda.synchronize()\n")


def test_an_option_is_of_the_script_that_adds_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    option = "import argparse\nimport torch\nparser = argparse.ArgumentParser()\nparser.add_argument('--device', default='cuda')\n"
    (source / "plot.py").write_text(f"{option}import jax\njax.device_put(torch.ones(1).numpy(), parser.parse_args().device)\n")
    (source / "train.py").write_text(f"{option}args = parser.parse_args()\ntorch.ones(1).to(args.device)\n")
    assert [one.path for one in port(source, tmp_path / "out", to="npu").changed] == ["train.py"]


KERNELS = {
    "setup.py": "import torch\nfrom torch.utils.cpp_extension import CUDA_HOME, CppExtension, CUDAExtension\n"
    "kind = CUDAExtension if torch.cuda.is_available() and CUDA_HOME is not None else CppExtension\nNAME = 'scan'\n"
    "modules = [kind(f'{NAME}_kernels', ['scan.cu'])]\n",
    "ops.py": "import torch\nimport scan_kernels\n\n\n"
    "class Scan(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
    "        if not x.is_cuda:\n            raise TypeError\n        return scan_kernels.forward(x)\n",
    "model.py": "import torch\ntry:\n    from ops import Scan\n    fast = True\nexcept ImportError:\n    fast = False\n\n\n"
    "def scan(x):\n    if fast and x.device.type == 'cuda':\n        return Scan.apply(x)\n    return x.cumsum(0)\n\n\n"
    "def plain(x):\n    return x if x.is_cuda else x.cuda()\n",
    "cudnn.py": "import torch\n\n\ndef can(x):\n    if not torch.backends.cudnn.enabled or x.device.type != 'cuda':\n"
    "        return False\n    return True\n",
    "host.py": "from torch.utils.cpp_extension import load\nhost = load('host', ['host.cpp'])\n",
    "plugin.py": "import torch\nfrom torch.utils.cpp_extension import load\n_plugin = None\n\n\n"
    "def begin():\n    global _plugin\n    try:\n"
    "        _plugin = load('act', ['act.cu'])\n    except Exception:\n        pass\n    return _plugin is not None\n\n\n"
    "def act(x):\n    if x.is_cuda and begin():\n        return _plugin.act(x)\n    return x.relu().cuda()\n",
}
"""A folder with kernels of its own: imported behind a try, built at run time, and without any other way."""


def test_what_guards_kernels_asks_about_cuda(tmp_path: Path) -> None:
    """Another device has none of them: there the script's own way without them is taken."""
    source = tmp_path / "source"
    source.mkdir()
    for name, text in KERNELS.items():
        (source / name).write_text(text)
    result = port(source, tmp_path / "out", to="npu")
    changed = {file.path: [line for _, _, after in file.lines for line in after.splitlines()] for file in result.changed}
    assert changed == {
        "model.py": ["import torch_npu", "    return x if x.is_npu else x.npu()"],
        "plugin.py": ["import torch_npu", "    return x.relu().npu()"],
    }
    reasons = {(one.path, one.line): (one.reason.partition(":")[0], one.look) for one in result.seen}
    assert ("host.py", 2) not in reasons
    assert reasons["ops.py", 2] == ("kernels in CUDA, built by setup.py", True)
    assert reasons["plugin.py", 9] == ("kernels in CUDA, built here", False)
    assert reasons["model.py", 10][0] == reasons["cudnn.py", 5][0] == "it guards kernels in CUDA, or cuDNN's"


@pytest.mark.usefixtures("autoloaded")
def test_a_proof_says_which_line_needs_kernels(tmp_path: Path, warm: str) -> None:
    for name, text in KERNELS.items():
        (tmp_path / name).write_text(text)
    result = port(tmp_path, tmp_path / "out", to="npu")
    proof = proving.prove(tmp_path, tmp_path / "out", f"{warm} ops.py", look=result.look)
    assert "At ops.py:2 stands import scan_kernels: kernels in CUDA, built by setup.py:5: write them with" in proof.sentence


def test_what_is_of_cuda_in_apex_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nfrom apex import amp\nfrom apex.parallel import DistributedDataParallel\n")
    seen = port(tmp_path / "train.py").seen
    assert [(one.line, one.look) for one in seen] == [(2, False), (3, True)]


@pytest.mark.parametrize("to", TARGETS)
def test_a_second_port_changes_nothing(tmp_path: Path, to: str) -> None:
    text = HEAD + "\n".join(case[0] for case in CASES) + "\n"
    new = ported(tmp_path, text, to)
    assert new != text
    again = tmp_path / "again"
    again.mkdir()
    assert ported(again, new, to) == new


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_the_rest_stays_as_it_was(tmp_path: Path, newline: str, mark: str) -> None:
    lines = ["import torch", "", "größe = 'cuda'  # ünicode  ", "x = torch.ones( 2 ) ; y = x .to( größe )", "\t", "#end"]
    text = mark + newline.join(lines)
    changed = ["import torch", "import torch_npu", "", lines[2].replace("cuda", "npu"), *lines[3:]]
    assert ported(tmp_path, text, "npu") == mark + newline.join(changed)


@pytest.mark.parametrize("where", ["beside", "in place"])
def test_undo_gives_back_the_bytes(tmp_path: Path, where: str) -> None:
    source = tmp_path / "source"
    (source / "lib").mkdir(parents=True)
    (source / "train.py").write_text("import torch\nfrom lib.devices import choose\nx = torch.ones(2).to(choose())\n")
    (source / "lib" / "devices.py").write_text("def choose():\n    return 'cuda'\n")
    (source / "notes.txt").write_text("cuda")
    before = {path.relative_to(source): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    out = source if where == "in place" else tmp_path / "out"
    result = port(source, out, to="npu")
    assert "'npu'" in (out / "lib" / "devices.py").read_text()
    assert result.changes == 1
    assert (out / "notes.txt").read_text() == "cuda"
    assert undo(out) == (1, ())
    assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_undo_leaves_what_was_edited_since(tmp_path: Path) -> None:
    new = ported(tmp_path, "import torch\na = torch.device('cuda')\nb = torch.device('cuda')\n", "npu")
    path = tmp_path / "out" / "train.py"
    path.write_text(new.replace("b = torch.device('npu')", "b = torch.device('mine')"))
    count, kept = undo(tmp_path / "out")
    assert count == 2
    assert kept == ("train.py, line 3: it was edited since",)
    assert path.read_text() == "import torch\na = torch.device('cuda')\nb = torch.device('mine')\n"


def test_a_record_that_names_a_file_outside_is_refused(tmp_path: Path) -> None:
    ported(tmp_path, "import torch\na = torch.device('cuda')\n", "npu")
    outside = tmp_path / "outside.py"
    outside.write_text("npu")
    record = tmp_path / "out" / "trueup-port.json"
    content = json.loads(record.read_text())
    content["changed"][0]["path"] = "../outside.py"
    record.write_text(json.dumps(content))
    with pytest.raises(TrueupError, match=r"names \.\./outside\.py, which is outside"):
        undo(tmp_path / "out")
    assert outside.read_text() == "npu"


BAD = {
    "python2.py": ("import torch\nprint 'a'\n", "is Python 2: convert it to Python 3 first"),
    "open.py": ("import torch\nx = (\n", "line 2, cannot be read as Python: '(' was never closed"),
    "plain.py": ("x = 1\n", "does not use PyTorch"),
    "notes.ipynb": ("{}", "a notebook: save it as a script first"),
    "null.py": ("import torch\0\n", "cannot be read as Python"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_script(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = BAD[name]
    (tmp_path / name).write_text(text)
    assert main(["port", str(tmp_path / name), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert [line.split(":")[0].strip() for line in said.splitlines()[1:]] == ["expected", "got", "next"]
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_with_a_script_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("import torch\ntorch.ones(2).cuda()\n")
    (source / "old.py").write_text("import torch\nprint 'cuda'\n")
    (source / "notes.ipynb").write_text("{}")
    assert main(["port", str(source), "-o", str(tmp_path / "out"), "--to", "npu"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "; 2 files not read (old.py may need changes)." in said
    assert "is Python 2: convert it" in said
    assert "a notebook: save it as a script first" in said
    assert (tmp_path / "out" / "old.py").read_bytes() == (source / "old.py").read_bytes()
    assert main(["port", str(source), "--check", "--to", "npu"]) == 1
    (source / "old.py").write_text("import torch\nprint 'gpu'\n")
    assert main(["port", str(source), "-o", str(tmp_path / "other"), "--to", "npu"]) == 0
    (source / "more").symlink_to(source)
    assert main(["port", str(source), "-o", str(tmp_path / "third"), "--to", "npu"]) == 2


def test_links_are_named_and_one_line_is_enough(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("import torch; torch.ones(2).cuda()\n")
    (source / "b.py").symlink_to("a.py")
    (source / "checkpoints").mkdir()
    result = port(source, tmp_path / "out", to="npu")
    assert (tmp_path / "out" / "checkpoints").is_dir()
    assert (tmp_path / "out" / "a.py").read_text() == "import torch_npu\nimport torch; torch.ones(2).npu()\n"
    assert [one.partition(" is a link")[0] for one in result.unread] == [str(source / "b.py")]


def test_what_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.ones(2).cuda()\n")
    (tmp_path / "out").mkdir()
    assert main(["port", str(tmp_path / "train.py"), "-o", str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_version_of_cuda_that_is_read_as_a_text(tmp_path: Path) -> None:
    lines = [
        "import torch", "MAJOR = int(torch.version.cuda.split('.')[0])", "print(torch.version.cuda)",
        "new = torch.version.cuda is not None and torch.version.cuda[0] == '1'",
        "if torch.cuda.is_available():", "    print(float(torch.version.cuda))",
    ]  # fmt: skip
    (tmp_path / "a.py").write_text("\n".join(lines) + "\n")
    (changed,) = port(tmp_path / "a.py", tmp_path / "out").changed
    assert changed.lines[0] == (2, lines[1], """MAJOR = int((torch.version.cuda or "0.0").split('.')[0])""")
    assert [one[0] for one in changed.lines] == [2, 5]
    assert not port(tmp_path / "out" / "a.py").changed
    assert cuda_version.lines("\n".join(lines)) == {2, 6}  # in the live process the same places


def test_check_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "train.py"
    source.write_text("import torch\ntorch.ones(2).cuda()\n")
    assert main(["port", str(source), "--check", "--to", "npu", "--json", str(tmp_path / "all.json")]) == 1
    assert "To convert: 2 changes in 1 of 1 script, for npu." in capsys.readouterr().out
    found = json.loads((tmp_path / "all.json").read_text())
    assert [one["rule"] for one in found["changed"][0]["changes"]] == ["import", "to-device"]
    source.write_text("import torch\ntorch.ones(2)\n")
    assert main(["port", str(source), "--check"]) == 0


def test_rules_and_tables_of_the_old_converter(tmp_path: Path) -> None:
    rules = {
        "rules": {
            "ArgsModifyRule": [{"func_name": "load", "arg_idx": 0, "arg_new": "'new.pt'"}],
            "FuncNameModifyRule": [{"old_name": "build", "new_name": "construct"}],
            "ModuleNameModifyRule": [{"old_name": "kernels", "new_name": "functions", "parent_module": "mine"}],
        }
    }
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    source = tmp_path / "train.py"
    head = "import torch\nimport mine.kernels\n"
    source.write_text(f"{head}x = build(load('old.pt', 1))\nmine.kernels.run(x)\ntorch.cuda.nvtx.mark('a')\n")
    arguments = ["port", str(source), "-o", str(tmp_path / "out"), "-r", str(tmp_path / "rules.json"), "--tables", "--to", "npu"]
    assert main(arguments) == 0
    new = (tmp_path / "out" / "train.py").read_text()
    assert "x = construct(load('new.pt', 1))\nmine.functions.run(x)" in new
    assert (tmp_path / "out" / "change_list.csv").read_text().startswith("File,Start Line,End Line,Operation Type,Message\n")
    assert "torch.cuda.nvtx.mark('a')" in (tmp_path / "out" / "unsupported_api.csv").read_text()
    log = (tmp_path / "out" / "msFmkTranspltlog.txt").read_text()
    assert "train.py:3 [MODIFY] own: 'build' -> 'construct'" in log
    assert "train.py:5 [UNSUPPORTED] torch.cuda.nvtx.mark('a'): a tool of CUDA's" in log
    assert zipfile.is_zipfile(tmp_path / "out" / "unsupported_op.xlsx")


IMPORTED = """\
import torch
import torch.utils.data
import torch.utils.data as loaders
from torch.utils.data import DataLoader, TensorDataset
from torch.utils import data
from mine import build, kernels
import apex.amp
x = torch.utils.data.DataLoader(data.TensorDataset(loaders.y, kernels.z))
build(apex.amp.initialize(map(build, x)))
"""
RENAMED = """\
import torch
import torch_npu
import torch.utils.data2
import torch.utils.data2 as loaders
from torch.utils.data2 import DataLoader, TensorDataset
from torch.utils import data2 as data
from mine import construct as build
from mine.functions import fast as kernels
import apex_npu.amp
x = torch.utils.data2.DataLoader(data.TensorDataset(loaders.y, kernels.z))
build(apex_npu.amp.initialize(map(build, x)))
"""


def test_rules_reach_what_is_imported(tmp_path: Path) -> None:
    modules = [("data", "data2", "torch.utils"), ("kernels", "functions.fast", "mine"), ("apex", "apex_npu", "")]
    names = ("old_name", "new_name", "parent_module")
    rules = {
        "ModuleNameModifyRule": [dict(zip(names, one, strict=True)) for one in modules],
        "FuncNameModifyRule": [{"old_name": "build", "new_name": "construct"}],
    }
    (tmp_path / "rules.json").write_text(json.dumps({"rules": rules}))
    (tmp_path / "train.py").write_text(IMPORTED)
    port(tmp_path / "train.py", tmp_path / "out", to="npu", rules=tmp_path / "rules.json")
    assert (tmp_path / "out" / "train.py").read_text() == RENAMED
    assert port(tmp_path / "out" / "train.py", to="npu", rules=tmp_path / "rules.json").changes == 0


def test_the_guides_converter_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proj").mkdir()
    body = "    torch.cuda.set_device(0)\n    print(torch.ones(2).cuda(0).to('cuda:1'), torch.device('cuda', 0))\n"
    (tmp_path / "proj" / "main.py").write_text(f"import torch\nimport apex.optimizers\nif __name__ == '__main__':\n{body}")
    monkeypatch.chdir(tmp_path)
    words = words_of("-i proj -o out -s -sim".split())
    assert main(words) == 0
    new = Path("out/proj_msft/main.py").read_text()
    assert new.partition("if ")[0] == "import torch\nimport torch_npu\nimport os\nimport apex.optimizers\n"
    assert new.partition("__main__':\n")[2] == (
        '    if torch.npu.is_available():\n        torch.npu.set_device(int(os.environ.get("DEVICE_ID", 0)))\n'
        "    torch.npu.set_device(torch.npu.current_device())\n    print(torch.ones(2).npu().to('npu'), torch.device('npu'))\n"
    )
    assert {"change_list.csv", "msFmkTranspltlog.txt"} <= {path.name for path in Path("out/proj_msft").iterdir()}
    assert main([*words[:2], "-o", "again", *words[4:]]) == 0
    assert port(Path("again"), to="npu", also=["specify-device", "similar"]).changes == 0
    assert words_of("-i a/b.py -o out -r r.json distributed -m b.py -t net".split())[4:] == (
        "--to npu --tables --rules r.json --distributed b.py --model net".split()
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "got:      Input data was truncated"),
        ('{"rules": {"Other": []}}', "'Other' is unknown"),
        ('{"rules": {"ArgsModifyRule": [{"func_name": "f", "arg_idx": 0, "arg_new": "import os"}]}}', "is no expression of Python"),
    ],
)
def test_rules_that_cannot_be_used(tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules.json").write_text(content)
    (tmp_path / "train.py").write_text("import torch\n")
    assert main(["port", str(tmp_path / "train.py"), "--check", "-r", str(tmp_path / "rules.json")]) == 2
    assert message in capsys.readouterr().err


PAGE = (Path(__file__).parents[2] / "docs" / "port.md").read_text()
OWN = PAGE[PAGE.index("```toml\n") + len("```toml\n") :].partition("```")[0]
"""The rules that the documentation shows."""
USES = """\
import torch
import mine.kernels
from mine.io import load, place
place(mine.kernels.fused_norm(x), where="cuda:1")
load(path="old.pt").restore("a", 3)
torch.cuda.synchronize()
"""
MADE = """\
import torch
import torch_npu
import mine.npu
import mine.kernels
from mine.io import load, place
place(mine.npu.fused_norm(x), where="npu:1")
load(path='new.pt').restore('new.pt', 3)
torch.cuda.synchronize()
"""


def test_rules_in_toml(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(OWN)
    assert ported_by(tmp_path, USES) == (MADE, {"our profiler replaces it"})
    again = port(tmp_path / "out" / "train.py", to="npu", rules=tmp_path / "rules.toml")
    assert again.changes == 0
    (tmp_path / "rules.toml").write_text(OWN.replace('until = "9.0"', 'until = "2.0"'))
    assert "mine.kernels.fused_norm(x)" in ported_by(tmp_path, USES)[0]


def ported_by(tmp_path: Path, text: str) -> tuple[str, set[str]]:
    (tmp_path / "train.py").write_text(text)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    result = port(tmp_path / "train.py", tmp_path / "out", to="npu", rules=tmp_path / "rules.toml")
    return (tmp_path / "out" / "train.py").read_text(), {one.reason for one in result.seen}


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ('"mine.npu.{name}"', '"mine.npu.("', "name 1: 'mine.npu.(' is no expression of Python"),
        ('id = "place"', 'id = "checkpoint"', "there are two rules 'checkpoint'"),
        ('id = "place"', 'id = "autocast"', "there are two rules 'autocast', one of them Trueup's"),
        ("becomes = \"'new.pt'\"", 'becomes = "import os"', "argument 1: 'import os' is no expression of Python"),
        ("y = mine.npu.fused_mlp(x)", "y = 3", "'fused-layers' makes of its example, for npu: 'y = mine.npu.fused_mlp(x)'"),
        ("y = mine.kernels.fused_mlp(x)", "y = (", "the example 'y = (' is no Python: '(' was never closed"),
        ("position = 0 ", "#", "'checkpoint' makes of its example"),
        ("[[left]]", "[[other]]", "'other' is unknown: expected name, argument, sink, left"),
        ("[[name]]", "[[name]", "Expected "),
    ],
)
def test_rules_in_toml_that_cannot_be_used(tmp_path: Path, good: str, bad: str, message: str) -> None:
    assert good in OWN
    (tmp_path / "rules.toml").write_text(OWN.replace(good, bad, 1))
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(TrueupError) as error:
        port(tmp_path / "train.py", tmp_path / "out", rules=tmp_path / "rules.toml")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 4
    assert not (tmp_path / "out").exists()


ALSO = {
    "drop-last": ("train_loader = DataLoader(x, 4, True)", "train_loader = DataLoader(x, 4, True, drop_last=True)"),
    "shuffle-validation": ("val_loader = DataLoader(x, shuffle=False)", "val_loader = DataLoader(x, shuffle=True)"),
    "float32": ("y = x.double().to(torch.float64)", "y = x.float().to(torch.float32)"),
    "one-device": (
        "model = torch.nn.DataParallel(model, [0, 1]).eval()\nnet = torch.nn.DataParallel(net)\nrun = net\nrun.module.fc(x)\n"
        "other.module\nboth = torch.nn.DataParallel(a) if one else torch.nn.parallel.DistributedDataParallel(a)\nboth.module",
        "model = model.eval()\nnet = net\nrun = net\nrun.fc(x)\n"
        "other.module\nboth = torch.nn.DataParallel(a) if one else torch.nn.parallel.DistributedDataParallel(a)\nboth.module",
    ),
    "no-jit": ("@torch.jit.script\ndef f(x): pass\ng = torch.jit.script(f)", "def f(x): pass\ng = f"),
    "int32-labels": (
        "loss = torch.nn.CrossEntropyLoss()\nloss(x, y)",
        'loss = torch.nn.CrossEntropyLoss()\nloss(x, y.int() if y.device.type == "npu" else y)',
    ),
}


@pytest.mark.parametrize("name", ALSO)
def test_what_changes_numbers_is_asked_for(tmp_path: Path, name: str) -> None:
    head, (before, after) = "import torch\nfrom torch.utils.data import DataLoader\n", ALSO[name]
    source = tmp_path / "train.py"
    source.write_text(f"{head}{before}\n")
    assert port(source).changes == 0
    result = port(source, tmp_path / "out", also=list(ALSO))
    assert (tmp_path / "out" / "train.py").read_text() == f"{head}{after}\n"
    assert [word in result.effects[0] for word in ("batch", "steps")] == [True, True]
    assert port(tmp_path / "out", also=list(ALSO)).changes == 0
    with pytest.raises(TrueupError, match="There is no edit 'more'"):
        port(source, also=["more"])


def test_the_page(tmp_path: Path) -> None:
    lines = ("x = torch.ones(2).cuda()  # <b>", "y = 'cuda'", "torch.cuda.nvtx.mark('a')", "if y:", "    x.cuda()")
    (tmp_path / "train.py").write_text("\n".join(("import torch", *lines, "")))
    assert main(["port", str(tmp_path / "train.py"), "--check", "--to", "npu", "--html", str(tmp_path / "page.html")]) == 1
    page = (tmp_path / "page.html").read_text()
    assert "<ins>+ x = torch.ones(2).npu()  # &lt;b&gt;</ins>" in page
    assert "<ins>+ x.npu()</ins>" in page, "no indentation that all lines share"
    assert "a tool of CUDA&#39;s without counterpart" in page
    assert "<b>\n" not in page


def arguments(*words: object) -> int:
    return main(["port", *map(str, words)])


@pytest.mark.usefixtures("autoloaded")
@pytest.mark.parametrize("to", TARGETS)
def test_a_port_is_proved(tmp_path: Path, to: str, warm: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    text = (HERE / "training.txt").read_text()
    if to == "npu":  # another branch than on the CPU
        text = text.replace("seed_all(0)\n", "seed_all(0)\n        drawn = dict(size=torch.rand(1))\n")
    (source / "train.py").write_text(text)
    command = f"{warm} train.py --device cuda --epochs 1"  # a command line that somebody kept
    json_file = tmp_path / "all.json"
    assert arguments(source, "-o", tmp_path / "out", "--to", to, "--prove", command, "--steps", 2, "--json", json_file) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("Converted: ")
    assert "not proved" not in said
    assert "The port trains the same: 2 steps, " in said
    assert ("for on the CPU it trains otherwise (" in said) == (to == "npu")
    assert ("What it decides by the device: train.py:37, if torch.cuda.is_available(): size." in said) == (to == "npu")
    found = json.loads(json_file.read_text())
    assert found["proof"]["exit_code"] == 0
    assert not [one for one in found["seen"] if one["look"]]


def test_why_a_run_ended() -> None:
    assert proving._ended(139, ["a note"]) == "it was ended by SIGSEGV; its last line: a note"
    assert proving._ended(137, []) == "it was ended by SIGKILL"
    assert proving._ended(139, ["ValueError: no", "a note"]) == "ValueError: no"
    assert [proving._ended(1, lines) for lines in (["some text"], [])] == ["some text", "it ended with exit code 1"]


UNWRITTEN = """\
import ctypes
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for size in (24, 600, 5000, 70000):
    dirty = c.malloc(size)
    ctypes.memset(dirty, 7, size)
    c.free(dirty)
    print(ctypes.string_at(c.malloc(size), size) == bytes(size))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_that_nobody_wrote_reads_as_zeros_in_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    environment = {**os.environ, **proving.zeroed()}
    ran = subprocess.run([sys.executable, "-c", UNWRITTEN], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True"] * 4
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert proving.zeroed()["GLIBC_TUNABLES"].startswith("glibc.malloc.arena_max=1:glibc.malloc.perturb=255")


@pytest.mark.usefixtures("autoloaded")
def test_a_port_that_trains_otherwise(tmp_path: Path, warm: str, capsys: pytest.CaptureFixture[str]) -> None:
    rules = {"rules": {"ArgsModifyRule": [{"func_name": "Linear", "arg_idx": 1, "arg_new": "16"}]}}
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    source = tmp_path / "train.py"
    source.write_text(
        "import torch\nwhere = 'cuda' if torch.cuda.is_available() else 'cpu'\nmodel = torch.nn.Linear(4, 8).to(where)\n"
        "torch.nn.functional.dropout(model(torch.ones(2, 4).to(where))).sum().backward()\n"
    )
    words = source, "-o", tmp_path / "out", "-r", tmp_path / "rules.json", "--steps", 1, "--prove", f"{warm} train.py"
    assert arguments(*words) == 1
    assert "DEVIATES" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("port", "again", "code", "said"),
    [
        ({"clock": 7.0}, {"clock": 3.0}, 0, "of them differ between two runs of the original, too, and reach no gradient: torch."),
        ({"clock": 7.0}, {}, 1, "DEVIATES  torch.as_tensor"),
        ({"clock": 7.0, "slope": 0.2}, {"clock": 3.0}, 1, "DEVIATES  torch.nn.functional.leaky_relu"),
        ({"slope": 0.2}, {"clock": 3.0}, 1, "DEVIATES  negative_slope of torch.nn.functional.leaky_relu"),
        ({"data": 2.0}, {"data": 3.0}, 2, "Converted, not proved: two runs of the original do not train alike, either, so give"),
    ],
)
def test_what_the_original_does_not_repeat_is_no_fault_of_its_port(
    tmp_path: Path, port: dict[str, float], again: dict[str, float], code: int, said: str
) -> None:
    def trained(name: str, clock: float = 1.0, slope: float = 0.1, data: float = 1.0) -> Path:
        torch.manual_seed(0)
        weight = torch.randn(2, 3, requires_grad=True)
        with trueup.capture(tmp_path / name, level="api", detail="stats"):
            torch.as_tensor(clock).mul(2)
            torch.nn.functional.leaky_relu(torch.full((4, 2), data) @ weight, slope).sum().backward()
        return tmp_path / name

    base = trained("base")
    proof = proving.unrepeated(compare(base, trained("port", **port)), compare(base, trained("again", **again)), 1)
    assert (proof.exit_code, said in proof.sentence) == (code, True), proof.sentence


@pytest.mark.usefixtures("autoloaded")
def test_a_port_that_cannot_be_proved(tmp_path: Path, warm: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "train.py"
    source.write_text("import torch\nimport no_such_package\ntorch.ones(2).cuda().sum()\n")
    assert arguments(source, "-o", tmp_path / "out", "--prove", f"{warm} train.py") == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "Converted, not proved: the original does not run on the CPU: " in said
    assert f"(run by {warm})" in said
    assert (tmp_path / "out" / "train.py").is_file()
    for nothing in ("'", ""):
        assert arguments(source, "-o", tmp_path / "other", "--prove", nothing) == 2
        assert "There is no command to prove the port with" in capsys.readouterr().err
    assert arguments(source, "--check", "--prove", "python train.py") == 64
    assert "A port that is not written cannot be proved" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("autoloaded")
def test_the_proof_of_the_page(
    tmp_path: Path, warm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.split("## What is proved", 1)[1]
    Path("train.py").write_text(section.split("```python\n", 1)[1].split("```", 1)[0])
    command, _, printed = section.split("```console\n$ ", 1)[1].split("```", 1)[0].partition("\n")
    assert main([word if word != "python train.py" else f"{warm} train.py" for word in shlex.split(command)[1:]]) == 0
    said = " ".join(capsys.readouterr().out.split())
    first, last = " ".join(printed.split()).split(" ... ")
    assert said.startswith(first)
    assert said.endswith(last)


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (HERE.parent.parent / "docs" / "port.md").read_text()
    shown = page.split("```console\n$ ", 1)[1].split("```", 1)[0]
    command, _, printed = shown.partition("\n")
    monkeypatch.chdir(tmp_path)
    device = 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    Path("train.py").write_text(f"import torch\n\n{device}\nprint(torch.ones(2).to(device))\n")
    assert main(command.split()[1:]) == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [line.strip() for line in printed.splitlines()]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("no CUDA", "no file", "; and with CUDA's calls sent to the simulated device: no file"),
        ("no file", "no file", "; nor with CUDA's calls sent to the simulated device"),
    ],
)
def test_an_original_that_fails_twice_says_both(first: str, second: str, said: str) -> None:
    assert proving._also(first, second) == said


@pytest.mark.usefixtures("autoloaded")
def test_a_port_that_uses_no_device_is_not_proved(tmp_path: Path, warm: str) -> None:
    """Its device is an option that the command leaves out: both runs are on the CPU, and nothing is shown by it."""
    text = "import sys, torch\nmodel = torch.nn.Linear(2, 1)\nif '--cuda' in sys.argv:\n    model.cuda()\n"
    (tmp_path / "train.py").write_text(f"{text}model(torch.ones(1, 2)).sum().backward()\n")
    port(tmp_path / "train.py", tmp_path / "out", to="npu")
    proof = proving.prove(tmp_path / "train.py", tmp_path / "out", f"{warm} train.py", steps=1)
    assert proof.exit_code == 2
    assert "nothing of the port ran on the device" in proof.sentence


def test_what_chooses_a_device_outside_of_the_scripts(tmp_path: Path) -> None:
    """Nothing of it is rewritten; each line is listed, with what to say there."""
    settings = '{"backend": "nccl", "device": "cuda:1", "name": "cuda", "words": ["cuda", "x"],\n "cuda": 3}\n'
    (tmp_path / "settings.json").write_text(settings)
    (tmp_path / "run.sh").write_text("# CUDA_VISIBLE_DEVICES=0\nCUDA_VISIBLE_DEVICES=1 python train.py /data/cuda\n")
    (tmp_path / "train.py").write_text(
        "import argparse\nimport json\nimport torch\nfrom torch.distributed import init_process_group\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--backend')\nparser.add_argument('--own', default='nccl')\n"
        "args, settings = parser.parse_args(), json.load(open('settings.json'))\n"
        "init_process_group(backend=settings['backend'])\ninit_process_group(args.backend)\ninit_process_group(args.own)\n"
        "device = torch.device(settings['device'])\ntorch.ones(2).to(settings['dtype']).to(device)\n"
    )
    result = port(tmp_path, tmp_path / "out", to="npu")
    listed = [(one.path, one.line, one.reason.rpartition(": ")[2]) for one in result.look]
    assert listed == [
        ("train.py", 9, "say hccl where it says nccl"), ("train.py", 10, "say hccl where it says nccl"),
        ("train.py", 12, "say npu where it says cuda"), ("run.sh", 2, "an NPU reads ASCEND_RT_VISIBLE_DEVICES"),
        ("settings.json", 1, "say hccl where it says nccl"),
    ]  # fmt: skip
    assert [one.path for one in result.changed] == ["train.py"]


def test_what_only_asks_about_a_device_imports_nothing_for_it(tmp_path: Path) -> None:
    text = "import torch\ny = x.device.type == 'cuda' and float(torch.version.cuda) > 11\n"
    asked = text.replace("'cuda'", "'npu'").replace("torch.version.cuda", '(torch.version.cuda or "0.0")')
    assert ported(tmp_path, text, "npu") == asked
    moved = ported(tmp_path, f"{text}x.cuda()\n", "npu")
    assert moved.startswith("import torch\nimport torch_npu\n")
