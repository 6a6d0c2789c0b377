"""Builds `src/trueup/migration/assess/npu.toml`: which of PyTorch's operators and functions Ascend NPUs run, and in which dtypes.

    python tools/npu_support.py OP_PLUGIN PYTORCH > src/trueup/migration/assess/npu.toml

The two folders are clones of https://gitcode.com/Ascend/op-plugin and https://gitcode.com/Ascend/pytorch. What is taken are facts:
names, versions, dtypes; each table says from which commit. Needs PyYAML.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import yaml

KERNELS = "op_plugin/config/op_plugin_functions.yaml"
ADAPTER = "torch_npu/csrc/aten/npu_native_functions.yaml"
PAGES = "docs/zh/api/native_api/pytorch_2-13-0"
PRODUCTS = {"Atlas A2 训练系列产品": "A2", "Atlas A3 训练系列产品": "A3", "Ascend 950DT": "950DT"}
DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "uint8": "uint8", "int8": "int8", "int16": "int16",
    "int32": "int32", "int64": "int64", "bool": "bool", "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip
ENTRY = re.compile(r"\*\*原生文档\*\*：\[(?P<name>[\w.]+)\].*?(?=\*\*原生文档\*\*|\Z)", re.DOTALL)
ROW = re.compile(r"\| <term>(.+?)</term> \| (\S) \|")
ONLY = re.compile(r"`(?:input|self|x|tensor)`仅支持([\w，]+)")
INFERENCE, FALLS_BACK = "不支持训练场景", "回退至CPU"


def shown(repository: Path, path: str) -> str:
    return subprocess.run(["git", "-C", repository, "show", f"HEAD:{path}"], capture_output=True, text=True, check=True).stdout


def commit(repository: Path) -> str:
    asked = ["git", "-C", repository, "log", "-1", "--format=%H of %cs"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def span(said: object, known: list[str]) -> tuple[str, str]:
    """Return the first and the last version of PyTorch of a range of theirs; an empty last one has not come yet."""
    if said == "all_version":
        return known[0], ""
    ends = re.findall(r"v[\d.]+|newest", str(said))
    return ends[0], "" if ends[-1] == "newest" or ends[-1] == known[-1] else ends[-1]


def order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.strip("v").split("."))) if version else (99,)


def kernels(op_plugin: Path, adapter: Path) -> dict[tuple[str, str], list[str]]:
    """Return the operators with a kernel, by the first and the last version of PyTorch in which they have it."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    table = yaml.safe_load(shown(op_plugin, KERNELS))
    known = table["all_version"]
    for entry in [*table["official"], *table["symint"], *table["quant"]]:
        spans = [span(entry[name], known) for name in ("acl_op", "op_api", "sparse") if entry.get(name)]
        if spans:
            since, until = min((one[0] for one in spans), key=order), max((one[1] for one in spans), key=order)
            found[since, until].append(entry["func"].partition("(")[0])
    for entry in yaml.safe_load(shown(adapter, ADAPTER))["supported"]:
        found[known[0], ""].append(entry["func"].partition("(")[0] if isinstance(entry, dict) else entry)
    return found


def functions(adapter: Path) -> dict[str, dict[str, object]]:
    """Return what is said of each function: products that lack it, dtypes that it is limited to, and remarks."""
    asked = ["git", "-C", adapter, "ls-tree", "-r", "--name-only", "HEAD", PAGES]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, object]] = {}
    for path in listed.stdout.split():
        for entry in ENTRY.finditer(shown(adapter, path)):
            name, body = entry["name"], entry[0]
            rows = ROW.findall(body)
            if not rows:
                continue
            lacking = sorted(PRODUCTS[product] for product, mark in rows if mark == "✘" and product in PRODUCTS)
            said: dict[str, object] = {"lacking": lacking}
            if (only := ONLY.search(body)) is not None:
                said["dtypes"] = [DTYPES[one] for one in only[1].split("，") if one in DTYPES]
            said["remarks"] = [word for word, sign in (("inference", INFERENCE), ("falls-back", FALLS_BACK)) if sign in body]
            found[name if name.startswith("torch") else f"torch.{name}"] = said
    return found


def listing(names: list[str]) -> str:
    """Return names as an array over lines of at most 132 characters."""
    lines, line = [], "   "
    for name in sorted(set(names)):
        if len(line) + len(name) + 4 > 130:
            lines.append(line)
            line = "   "
        line += f' "{name}",'
    return "[\n" + "\n".join([*lines, line]) + "\n]"


def main() -> None:
    op_plugin, adapter = Path(sys.argv[1]), Path(sys.argv[2])
    print("# Which operators and functions of PyTorch run on Ascend NPUs. Made by tools/npu_support.py; do not edit.\n")
    for name, repository, paths in (("op-plugin", op_plugin, [KERNELS]), ("pytorch", adapter, [ADAPTER, PAGES])):
        print(f'[[source]]\nrepository = "https://gitcode.com/Ascend/{name}"\ncommit = "{commit(repository)}"')
        print(f"paths = {paths}\n".replace("'", '"'))
    for (since, until), names in sorted(kernels(op_plugin, adapter).items(), key=lambda one: (order(one[0][0]), order(one[0][1]))):
        last = f'until = "{until[1:]}"\n' if until else ""
        print(f'[[kernels]]\nsince = "{since[1:]}"\n{last}names = {listing(names)}\n')
    groups: dict[str, list[str]] = defaultdict(list)
    for name, said in functions(adapter).items():
        key = "".join(f"{word} = {value}\n".replace("'", '"') for word, value in said.items() if value)
        groups[key].append(name)
    for key, names in sorted(groups.items()):
        print(f"[[functions]]\n{key}names = {listing(names)}\n")


if __name__ == "__main__":
    main()
