"""The simulated NPU of TensorFlow: ``import npu_device`` and ``import npu_bridge`` find it, and the CPU computes.

    npu_device.global_options().precision_mode = "allow_mix_precision"      # Keras' mixed_float16 from npu_device.open() on
    npu_device.global_options().precision_mode = "force_fp16"               # NotImplementedError: ... is not simulated ...
    npu_device.global_options().precison_mode = "force_fp16"                # ValueError: ... no option precison_mode; it has ...

TensorFlow gets no device of its own: operators run as the CPU's, so numbers are the CPU's. An option that would change numbers on
the device is carried out, or refused in one sentence; one of memory, compiling, communication or tools is checked and kept.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.simdev import standins

FAULT_VARIABLE, NOISE_VARIABLE = "TRUEUP_SIMDEV_FAULT", "TRUEUP_SIMDEV_NOISE"
PACKAGES = ("npu_device", "npu_convert_dropout", "npu_bridge", "hccl")
ADAPTER = "trueup.recording.adapters.tensorflow.session"
SWITCH, ONOFF = (False, True, 0, 1), (0, 1)
SAME = ("must_keep_origin_dtype", "allow_fp32_to_fp16", "allow_fp32_to_bf16")
"""Precision modes in which an operator keeps float32 where it has a kernel for it; all of the CPU's have."""
MIXED = {
    "allow_mix_precision": "mixed_float16",
    "allow_mix_precision_fp16": "mixed_float16",
    "allow_mix_precision_bf16": "mixed_bfloat16",
}
"""Precision modes, and the dtype policies of Keras that stand for them."""
PRECISION = (*SAME, *MIXED, "force_fp16", "force_fp32", "cube_fp16in_fp32out")
CHOICES: dict[str, tuple[Any, ...]] = {
    "graph_run_mode": ONOFF, "precision_mode": PRECISION,
    "op_select_implmode": ("high_performance", "high_precision", "high_performance_for_all", "high_precision_for_all"),
    "op_compiler_cache_mode": ("enable", "disable", "force"), "hcom_parallel": SWITCH, "is_tailing_optimization": SWITCH,
    "variable_format_optimize": SWITCH, "op_debug_level": (0, 1, 2, 3, 4), "enable_exception_dump": ONOFF,
    "jit_compile": (*SWITCH, "auto"), "enable_small_channel": SWITCH, "deterministic": ONOFF, "topo_sorting_mode": ONOFF,
    "overflow_flag": ONOFF, "external_weight": SWITCH, "enable_dump": SWITCH, "dump_mode": ("input", "output", "all"),
    "enable_dump_debug": SWITCH, "enable_profiling": SWITCH, "aoe_mode": ("1", "2", "3", "4"), "atomic_clean_policy": ONOFF,
    "static_memory_policy": (0, 1, 2), "recompute": ("auto", "manual"), "dynamic_node_type": ("0", "1"),
    "logical_device_cluster_deploy_mode": ("LB", "SINGLE"),
}  # fmt: skip
"""Options and what they may be; any other option may be anything (Ascend/tensorflow, tf_adapter_2.x/python/npu_device/configs)."""
GLOBAL = (
    "graph_run_mode graph_memory_max_size variable_memory_max_size variable_format_optimize enable_scope_fusion_passes "
    "fusion_switch_file precision_mode op_select_implmode optypelist_for_implmode op_compiler_cache_mode "
    "op_compiler_cache_dir stream_max_parallel_num hcom_parallel hcom_multi_mode is_tailing_optimization op_debug_level "
    "op_debug_config debug_dir modify_mixlist enable_exception_dump enable_small_channel deterministic "
    "op_precision_mode graph_exec_timeout topo_sorting_mode customize_dtypes overflow_flag stream_sync_timeout "
    "event_sync_timeout external_weight jit_compile graph_compiler_cache_dir auto_tune_mode"
).split()
GROUPS: dict[str, Any] = {
    "dump_config": "enable_dump dump_path dump_step dump_mode enable_dump_debug dump_debug_mode".split(),
    "aoe_config": ["aoe_mode", "work_path"],
    "profiling_config": ["enable_profiling", "profiling_options"],
    "memory_config": ["atomic_clean_policy", "static_memory_policy"],
    "experimental": {
        "multi_branches_config": ["input_shape", "dynamic_node_type", "dynamic_dims"],
        "logical_device_deploy_config": ["logical_device_cluster_deploy_mode", "logical_device_id"],
        "graph_memory_optimize_config": ["recompute"],
        "resource_path_config": None,
    },
}
"""Options of ``npu_device.global_options()``, and its groups."""
SESSION = {
    *GLOBAL, *GROUPS["dump_config"], *GROUPS["aoe_config"],
    *(
        "use_off_line mix_compile_mode enable_data_pre_proc iterations_per_loop profiling_mode profiling_options "
        "buffer_optimize compress_weight_conf enable_compress_weight dynamic_dims dynamic_graph_execute_mode "
        "dynamic_input dynamic_node_type dynamic_inputs_shape_range input_shape job task_index local_device_list "
        "local_rank_id lower_functional_ops mstune_mode min_group_size session_device_id distribute_config device_type "
        "soc_config hccl_timeout op_wait_timeout op_execute_timeout HCCL_algorithm static_memory_policy "
        "enable_reduce_precision"
    ).split(),
}  # fmt: skip
"""Keys of ``NpuOptimizer``'s ``parameter_map`` in a session's settings (tf_adapter/util/npu_attrs.cc, NPURunConfig)."""
DTYPES = "dtypes stay as the script wrote them (must_keep_origin_dtype), or follow Keras' mixed precision (allow_mix_precision)"
NOT_SIMULATED = {
    "modify_mixlist": DTYPES, "customize_dtypes": DTYPES, "op_precision_mode": "an operator has the CPU's one kernel",
    "op_select_implmode": "an operator has the CPU's one kernel; leave it out, or ask for high_precision",
    "enable_compress_weight": "weights stay as they are", "enable_reduce_precision": DTYPES,
    "iterations_per_loop": "a run of a session is one step; expected 1",
}  # fmt: skip
"""Options that would change numbers on the device, and what the simulated one does."""
HARMLESS = (None, False, 0, "", "0", "high_precision", "high_precision_for_all")
RECORDS = {
    "enable_dump": "`trueup capture -o DIR -- COMMAND` records the same calls",
    "enable_dump_debug": "`trueup watch -- COMMAND` looks for overflow",
}
"""Dumps of the device, and the commands that stand for them: under these, the option is right, for what it asks for is recorded."""


def install() -> None:
    """Let imports of the vendor's packages find the device, and plant the fault that the environment names once TensorFlow is
    captured; nothing of TensorFlow is imported."""
    standins.install(*PACKAGES)
    if os.environ.get(FAULT_VARIABLE):
        from trueup.recording.engine.replacing import WhenLoaded

        WhenLoaded(ADAPTER, _plant).install()


def _plant() -> None:
    from trueup.simdev.tensorflow_faults import plant

    plant(os.environ[FAULT_VARIABLE])


def begin() -> None:
    """Look at the environment when a script imports the device: noise is refused, and a fault that changed nothing is told at the
    end. Raises TrueupError."""
    if os.environ.get(NOISE_VARIABLE):
        raise TrueupError(
            "TensorFlow's simulated device has no noise.\n"
            f"  where:    {NOISE_VARIABLE}\n  expected: nothing, in TensorFlow\n  got:      {os.environ[NOISE_VARIABLE]}\n"
            "  next:     leave it out; PyTorch's device has it"
        )
    if os.environ.get(FAULT_VARIABLE):
        atexit.register(_tell_if_idle, os.environ[FAULT_VARIABLE])


def _tell_if_idle(name: str) -> None:
    faults = sys.modules.get("trueup.simdev.tensorflow_faults")
    if faults is None or not any(one.fired for one in faults.planted):
        where = "calls that a capture records, and none in a session or in what XLA compiles"
        print(f"trueup: the fault {name} changed nothing: in TensorFlow it breaks {where}", file=sys.stderr)


def check(name: str, value: Any, where: str) -> None:
    """Check one option.

    Raises:
        ValueError: it is none of those that the device takes, or the file that it names is not there.
        NotImplementedError: it would change numbers, or write what only the device can.
    """
    allowed = CHOICES.get(name)
    if allowed is not None and value not in (None, "") and str(value) not in [str(one) for one in allowed]:
        raise ValueError(f"{where}: {name} is {value!r}; it may be {', '.join(map(str, allowed))}")
    if name == "fusion_switch_file" and value and not Path(str(value)).is_file():
        raise ValueError(f"{where}: {name} names {value!r}, which is no file")
    why = NOT_SIMULATED.get(name) if value not in HARMLESS else None
    if name == "precision_mode" and value in PRECISION and value not in (*SAME, *MIXED):
        why = DTYPES
    if name == "overflow_flag" and str(value) == "0":
        why = "Inf and NaN stay as they are (overflow_flag 1)"
    if name == "iterations_per_loop" and str(value) == "1":
        why = None
    if why is not None:
        raise NotImplementedError(f"{where}: {name}={value!r} is not simulated: {why}")
    if name in RECORDS and value not in HARMLESS and not _recording():
        raise NotImplementedError(f"{where}: {name}={value!r}: the simulated device writes no dump; {RECORDS[name]}")


def _recording() -> bool:
    adapter = sys.modules.get(ADAPTER)
    return adapter is not None and adapter.running.session is not None


def one_worker(where: str) -> None:
    """Raise NotImplementedError where the environment says that several workers train together."""
    size = os.environ.get("RANK_SIZE", "1")
    if size not in ("", "1"):
        raise NotImplementedError(f"{where}: RANK_SIZE={size} is not simulated: TensorFlow's simulated device has one worker")


def check_session(config: Any) -> list[str]:
    """Check the settings of a session that ``NpuOptimizer`` reads; return its keys that no version of the adapter has, which the
    device passes over. Raises as `check` does, and NotImplementedError for mixed precision, which no graph takes from Keras."""
    unknown = []
    for custom in config.graph_options.rewrite_options.custom_optimizers if config is not None else ():
        if custom.name != "NpuOptimizer":
            continue
        one_worker("NpuOptimizer")
        for name, held in custom.parameter_map.items():
            kind = held.WhichOneof("value")
            value = None if kind is None else getattr(held, kind)
            value = value.decode(errors="replace") if isinstance(value, bytes) else value
            if name not in SESSION:
                unknown.append(name)
                continue
            check(name, value, "NpuOptimizer")
            if name == "precision_mode" and value in MIXED:
                raise NotImplementedError(f"NpuOptimizer: {name}={value!r} is not simulated in a session: {', '.join(SAME)} are")
            if name == "deterministic" and str(value) == "1":
                raise NotImplementedError("NpuOptimizer: deterministic=1: call tf.config.experimental.enable_op_determinism()")
    return unknown
