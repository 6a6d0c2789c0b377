"""``config.json``: read, checked, and put in our words. A key that has no effect is said, an unknown one is refused."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup_compat.msprobe.loading import LoadOptions, checked

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SIDES = ("all", "forward", "backward", "input", "output")
SUMMARIES = ("statistics", "md5", "xor")
SIZE_LIMIT = 1 << 20
DUMP_PATH = "./dump_path"
"""Of a debugger without a file: what the file that comes with the tool says."""


class ConfigError(TrueupError):
    """The configuration asks for what is not there, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Config:
    """What a configuration asks for, checked."""

    task: str
    level: str
    path: Path
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    extra_info: bool
    scope: tuple[str, ...]
    names: tuple[str, ...]
    sides: tuple[str, ...]
    summary: str
    tensor_list: tuple[str, ...]
    """Calls whose tensors are kept in task statistics."""
    load: LoadOptions | None
    enabled: bool
    """``dump_enable``, which may change while the run goes on: see `enabled_now`."""
    said: tuple[str, ...]
    """What is to be told of keys without effect."""

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels of the native capture."""
        return tuple(_table()["level"][self.level])

    @property
    def captured(self) -> tuple[str, ...]:
        """Levels of the native capture: ``module_dump`` may ask for a module at level L1."""
        return ("module", "api") if self.levels == ("api",) else self.levels

    @property
    def detail(self) -> str:
        """Detail of the native capture."""
        return "tensor" if self.tensor_list else str(_table()["task"][self.task])

    @property
    def dumps(self) -> bool:
        """Whether calls are dumped: not at level debug, nor where modules are loaded and nothing else."""
        return bool(self.levels) and (self.load is None or self.load.dump)


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("config.toml").read_text("utf-8"))


def read(path: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> Config:
    """Read a configuration.

    Args:
        path: of the file; None: only what is given.
        given: arguments of the debugger that go before the file's keys: task, dump_path, level, step.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value asks for what is not there.
    """
    told = {} if path is None else _load(Path(path))
    told |= {name: value for name, value in given.items() if value is not None}
    if path is None:
        told.setdefault("dump_path", DUMP_PATH)
    where = str(path) if path is not None else "the debugger's arguments"
    tasks = {*_table()["task"], *_table()["task_refused"]}
    _check_keys(where, {key: value for key, value in told.items() if key not in tasks}, "common", tasks)
    task = _one(where, "task", told.get("task") or "statistics", "task")
    level = _one(where, "level", told.get("level") or "L1", "level")
    said = list(_said(told))
    if task == "structure" and level not in ("L0", "mix"):
        said.append(f"task structure is of modules: level {level} is taken as mix, as in the tool")
        level = "mix"
    section = told.get(task) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: {task} is no object: expected e.g. {{\"scope\": [], \"list\": []}}")
    _check_keys(f"{where}: {task}", section, "section", ())
    load = _load_options(where, told)
    if load is not None and not load.dump:
        told.setdefault("dump_path", str(load.path))  # where nothing is dumped nothing is written
    if not isinstance(told.get("dump_path"), str) or not told["dump_path"]:
        raise ConfigError(f"{where} has no dump_path: expected the folder that the dump goes to")
    scope, names = (_texts(where, key, section.get(key)) for key in ("scope", "list"))
    if scope and (names or len(scope) != 2):
        raise ConfigError(f"{where}: scope takes the first and the last name, and no list beside it; got {list(scope)}")
    sides = _texts(where, "data_mode", section.get("data_mode")) or ("all",)
    if any(side not in SIDES for side in sides):
        raise ConfigError(f"{where}: data_mode {list(sides)}: expected of {', '.join(SIDES)}")
    summary = section.get("summary_mode") or "statistics"
    if summary not in SUMMARIES:
        raise ConfigError(f"{where}: summary_mode {summary!r}: expected {', '.join(SUMMARIES)}")
    extra, enabled = (_truth(where, key, told.get(key)) for key in ("extra_info", "dump_enable"))
    kept = _texts(where, "tensor_list", section.get("tensor_list")) if task == "statistics" else ()
    if kept:
        said.append("tensor_list: the files hold the tensors of these calls, the native capture those of all that are dumped")
    return Config(
        task, level, Path(told["dump_path"]), _numbers(where, "rank", told.get("rank")), _numbers(where, "step", told.get("step")),
        extra, scope, names, sides, str(summary), kept, load, enabled, tuple(said),
    )  # fmt: skip


def enabled_now(path: str | os.PathLike[str]) -> bool | None:
    """Read ``dump_enable`` anew; None where the file does not say, or cannot be read at present (somebody is writing it)."""
    try:
        found = _load(Path(path)).get("dump_enable")
    except ConfigError:
        return None
    return found if isinstance(found, bool) else None


def _load_options(where: str, told: Mapping[str, Any]) -> LoadOptions | None:
    section = told.get("load")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: load is no object: expected {{\"path\": ..., \"modules\": [...]}}")
    steps, ranks = (_numbers(f"{where}: load", key, section.get(key)) for key in ("step", "rank"))
    found = checked(section, steps, ranks)
    if isinstance(found, str):
        raise ConfigError(f"{where}: load: {found}")
    return found


def _truth(where: str, key: str, value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} {value!r}: expected true or false")
    return value


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(SIZE_LIMIT))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give PrecisionDebugger the path of a config.json") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no object: expected {{\"task\": \"statistics\", \"dump_path\": ...}}")
    return content


def _check_keys(where: str, told: Mapping[str, Any], table: str, more: Sequence[str] | set[str]) -> None:
    known, refused = _table()[table], _table()[f"{table}_refused"]
    for key, value in told.items():
        if key in refused:
            if value:
                raise ConfigError(f"{where}: {refused[key]}")
        elif key not in known:
            expected = ", ".join([*known, *sorted(more)])
            raise ConfigError(f"{where}: unknown key {str(key)[:80]!r}\n  expected: {expected}\n  next:     correct or remove it")


def _one(where: str, key: str, value: Any, table: str) -> str:
    """Return a value that is among those of a table."""
    known, refused = _table()[table], _table()[f"{table}_refused"]
    if isinstance(value, str) and value in refused:
        raise ConfigError(f"{where}: {refused[value]}")
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{where}: {key} {value!r}: expected {', '.join(known)}")
    return value


def _texts(where: str, key: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or any(not isinstance(text, str) for text in texts):
        raise ConfigError(f"{where}: {key} {value!r}: expected a list of names")
    for text in texts:
        if text.startswith("name-regex(") and text.endswith(")"):
            try:
                re.compile(text[len("name-regex(") : -1])
            except re.error as error:
                raise ConfigError(f"{where}: {text} is no regular expression: {error}") from None
    return tuple(texts)


def _numbers(where: str, key: str, value: Any) -> tuple[int, ...]:
    """Read numbers of steps or ranks: 3, "3", "4-6"."""
    found: set[int] = set()
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", str(item)) if type(item) in (int, str) else None
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first > 1 << 20:
            raise ConfigError(f'{where}: {key} {item!r}: expected numbers from 0 on, or "4-6"')
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _said(told: Mapping[str, Any]) -> Iterator[str]:
    """Say of keys without effect what holds instead, where they ask for something."""
    usual = {"async_dump": (False,), "precision": ("low",), "risk_level": ("ALL",)}
    for key, meaning in _table()["common"].items():
        if isinstance(meaning, str) and key in told and told[key] not in (None, *usual.get(key, ())):
            yield f"{key}: {meaning}"
