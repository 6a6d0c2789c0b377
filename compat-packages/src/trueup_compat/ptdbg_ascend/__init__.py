"""ptdbg_ascend over Trueup: the functions of its scripts, the files of its versions.

    from trueup_compat.ptdbg_ascend import register_hook, seed_all, set_dump_path, set_dump_switch, acc_cmp_dump

`switches` are the functions, `debugger` the class of versions 3 to 6, `named_modules` its ``module_dump``, `dumping` and `overflow`
what they set going, `modes` which calls are dumped, `layout` and `tree` the files, `comparing` and `table` the comparison, `parse`
and `shell` the prompt. What differs from the tool is in docs/compat.md.
"""

from trueup_compat.ptdbg_ascend.comparing import compare, compare_distributed
from trueup_compat.ptdbg_ascend.debugger import PrecisionDebugger
from trueup_compat.ptdbg_ascend.errors import CompareException
from trueup_compat.ptdbg_ascend.named_modules import module_dump, module_dump_end
from trueup_compat.ptdbg_ascend.parsing import parse
from trueup_compat.ptdbg_ascend.switches import (
    acc_cmp_dump,
    overflow_check,
    register_hook,
    seed_all,
    set_backward_input,
    set_dump_path,
    set_dump_switch,
    set_overflow_check_switch,
)

__all__ = [
    "CompareException", "PrecisionDebugger", "acc_cmp_dump", "compare", "compare_distributed", "module_dump", "module_dump_end",
    "overflow_check", "parse", "register_hook", "seed_all", "set_backward_input", "set_dump_path", "set_dump_switch",
    "set_overflow_check_switch",
]  # fmt: skip
