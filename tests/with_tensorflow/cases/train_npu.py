"""The training of `train.py`, as its users run it on Ascend: options, then the device, then the model."""

import sys
from pathlib import Path

import npu_device

npu_device.global_options().precision_mode = sys.argv[1]
npu_device.global_options().dump_config.enable_dump = True
npu_device.global_options().dump_config.dump_mode = "all"
npu = npu_device.open().as_default()
assert npu.name().endswith("device:NPU:0")

script = Path(__file__).with_name("train.py")
exec(compile(script.read_text(), str(script), "exec"))
