"""Kernels below loaded operators, dumped by the device's own `init_dump`, `set_dump` and `finalize_dump`, as acl.json says."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.recorded_call import Place, rebuild
from trueup.recording.execution.recorded import NotReplayable, RecordedCalls, home_of
from trueup_compat.dumper.hdf5 import numbered

CONFIG = Path("acl.json")
"""Where the guide has it: in the folder of the training."""


def device() -> Any:
    """Return ``torch.npu``. Raises TrueupError where there is none that dumps, or no acl.json."""
    found = getattr(torch, "npu", None)
    if not all(hasattr(found, name) for name in ("init_dump", "set_dump", "finalize_dump")):
        raise TrueupError(
            "load_with_acl_dump dumps the kernels below an operator by torch.npu.init_dump, set_dump and finalize_dump.\n"
            "  expected: an Ascend device with torch_npu, or TRUEUP_SIMULATED=1\n  got:      no torch.npu that has them\n"
            "  next:     trueup replay CAPTURE --device npu executes the operator on a device by itself"
        )
    if not CONFIG.is_file():
        raise TrueupError(
            f"load_with_acl_dump needs acl.json.\n  where:    {CONFIG.absolute()}\n"
            '  expected: {"dump": {"dump_list": [], "dump_path": "./output_IR2TBE", "dump_mode": "all", "dump_op_switch": "on"}}\n'
            "  got:      no such file"
        )
    return found


def dump(loaded: Path, groups: Collection[str]) -> int:
    """Execute operators of a capture, ``op/seqid``, on the device with what they were given there, each while its kernels are
    dumped; return how many. What cannot be executed is printed with the reason."""
    npu, capture = device(), open_capture(loaded)
    rank, home, count = min(capture.ranks), home_of(capture.ranks.values()), 0
    calls = RecordedCalls(capture)
    npu.init_dump()
    for one in numbered(loaded):
        if one.path not in groups:
            continue
        try:
            made = rebuild(calls.at(rank, one.seq), Place("npu", home))
            npu.set_dump(str(CONFIG))
            try:
                made.execute()
            finally:
                npu.finalize_dump()
            count += 1
        except (NotReplayable, RuntimeError) as error:
            print(f"trueup: {one.path} was not dumped: {first_line(error)}", flush=True)
    return count
