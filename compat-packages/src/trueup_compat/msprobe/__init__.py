"""msprobe's `PrecisionDebugger` over Trueup: ``config.json`` of 26.x in, a native capture and msprobe's files out.

    from trueup_compat.msprobe import PrecisionDebugger, seed_all

`config` reads the file, `debugger` is the class, `selection` tells which calls are wanted, `tree` and `entries` write the files;
`saving` is level debug, `loading` the section ``load``, `seeding` has `seed_all`. What differs from the tool is in docs/compat.md.
"""

from typing import Any

from trueup_compat.msprobe.config import ConfigError
from trueup_compat.msprobe.debugger import PrecisionDebugger
from trueup_compat.msprobe.seeding import seed_all

__all__ = ["ConfigError", "PrecisionDebugger", "module_dump", "module_dump_end", "seed_all"]

ELSEWHERE = {
    "TrainerMon": "trueup watch -- COMMAND looks at every step, and trueup compare at weights and gradients of two runs",
    "random_save": "a capture holds each random call with its stack: trueup show CAPTURE --op '*rand*'",
    "set_fx_dump_config": "torchair's graphs run on Ascend alone",
    "set_ge_dump_config": "torchair's graphs run on Ascend alone",
    "acl_save": "it runs inside graphs of an Ascend device",
    "AclGraphDumper": "it runs inside graphs of an Ascend device",
}
"""Names of ``msprobe.pytorch`` that are not there, and what there is."""


def module_dump(module: Any, dump_name: str) -> None:
    """Dump one module as ``Module.{dump_name}.{class}``, and no function, until `module_dump_end`; at level L1.

    Raises:
        ConfigError: there is no debugger, or an argument is of another type.
    """
    PrecisionDebugger.module_dump(module, dump_name)


def module_dump_end() -> None:
    """Go on with functions; the module's backward is dumped whenever it comes.

    Raises:
        ConfigError: there is no debugger.
    """
    PrecisionDebugger.module_dump_end()


def __getattr__(name: str) -> Any:
    """Say what there is instead of a name that is not there."""
    if name in ELSEWHERE:
        raise ConfigError(f"trueup_compat.msprobe has no {name}: {ELSEWHERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
