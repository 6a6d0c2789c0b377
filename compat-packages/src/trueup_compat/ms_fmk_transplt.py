"""``python -m trueup_compat.ms_fmk_transplt``: the porting guide's script converter, which is `trueup port`.

    python -m trueup_compat.ms_fmk_transplt -i train -o out [-r rules.json] [-s] [-sim] [distributed -m main.py [-t model]]

It writes ``out/train_msft``: the scripts for the NPU, ``change_list.csv``, ``msFmkTranspltlog.txt``, ``unsupported_op.xlsx`` (with
xlsxwriter), and with ``distributed`` ``run_distributed_npu.sh``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def words_of(arguments: Sequence[str]) -> list[str]:
    """Return the words of `trueup` for the converter's; exits with a usage message where they are none."""
    parser = argparse.ArgumentParser("ms_fmk_transplt", description="Convert a training for CUDA to one for the NPU.")
    parser.add_argument("-i", "--input", required=True, help="a script, or a folder of them")
    parser.add_argument("-o", "--output", required=True, help="where a folder with the suffix _msft is made")
    parser.add_argument("-r", "--rule", help="JSON with rules of your own")
    parser.add_argument("-s", "--specify-device", action="store_true", help="DEVICE_ID chooses the device")
    parser.add_argument("-sim", "--similar", action="store_true", help="similar functions for those the NPU lacks")
    spread = parser.add_subparsers(dest="spread", metavar="distributed").add_parser("distributed", help="a process for each device")
    spread.add_argument("-m", "--main", required=True, help="the script that is started, seen from the folder")
    spread.add_argument("-t", "--target_model", "--target-model", dest="model", help="the model's variable; found by its optimizer")
    given = parser.parse_args(arguments)
    source = Path(given.input).resolve()
    folder = source if source.is_dir() else source.parent
    also = [name for name, wanted in (("specify-device", given.specify_device), ("similar", given.similar)) if wanted]
    words = ["port", given.input, "--output", str(Path(given.output) / f"{folder.name}_msft"), "--to", "npu", "--tables"]
    words += ["--rules", given.rule] if given.rule else []
    words += ["--also", ",".join(also)] if also else []
    if given.spread:
        words += ["--distributed", given.main, *(("--model", given.model) if given.model else ())]
    return words


if __name__ == "__main__":
    from trueup.doors.cli import main

    sys.exit(main(words_of(sys.argv[1:])))
