"""The simulated NPU: scripts that import ``npu_device`` or ``npu_bridge`` run, are captured and compared; what is not simulated is
refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from recording import LINES, WARM, found_by, rows_of

import trueup
from trueup.doors.cli import app
from trueup.simdev import tensorflow as simulated

HERE = Path(__file__).parent
SESSION = """
import tensorflow.compat.v1 as tf
from npu_bridge.npu_init import *
from npu_bridge.estimator.npu import util
from npu_bridge.hccl import hccl_ops
tf1 = tf.compat.v1
tf1.disable_eager_execution()
config = tf1.ConfigProto()
custom_op = config.graph_options.rewrite_options.custom_optimizers.add()
custom_op.name = "NpuOptimizer"
custom_op.parameter_map["use_off_line"].b = True
custom_op.parameter_map["precision_mode"].s = tf.compat.as_bytes("allow_fp32_to_fp16")
custom_op.parameter_map["precison_mode"].s = b"force_fp16"
config.graph_options.rewrite_options.remapping = RewriterConfig.OFF
w = tf1.get_variable("w", initializer=[2.0])
optimizer = npu_distributed_optimizer_wrapper(tf1.train.GradientDescentOptimizer(0.25))
step = util.set_iteration_per_loop(None, optimizer.minimize(w * w), 1)
with tf1.Session(config=npu_config_proto(config_proto=config)) as sess:
    sess.run(tf1.global_variables_initializer())
    sess.run(step)
    print(sess.run(w), get_rank_size())
custom_op.parameter_map["precision_mode"].s = b"allow_mix_precision"
for attempt in (lambda: tf1.Session(config=config), NPURunConfig, lambda: NPUOptimizer(optimizer, is_loss_scale=True)):
    try:
        attempt()
    except NotImplementedError as error:
        print(error)
"""


TRAINING = f"""
import runpy, sys
sys.argv[1:] = ["allow_fp32_to_fp16"]
runpy.run_path({str(HERE / "train_npu.py")!r}, run_name="__main__")
"""


def start(folder: Path, words: list[str], script: str, text: str, **more: str) -> subprocess.Popen[str]:
    """Begin a command of docs/tensorflow.md where its script has a text."""
    folder.mkdir()
    (folder / script).write_text(text)
    command, environment = [WARM, "-m", "trueup", *words], found_by(WARM) | more
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env=environment)


def test_a_training_for_the_device_is_compared_with_that_of_the_cpu(
    tmp_path: Path, unedited: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, or the call that a planted fault breaks; with a dump asked for, for the capture records."""
    _, on_npu, compared, simulated, session = LINES
    npu, fault = {"TRUEUP_SIMULATED": "1"}, {"TRUEUP_SIMDEV_FAULT": "tanh-backward-without-square"}
    runs = [
        start(tmp_path / "npu", simulated, "train_npu.py", TRAINING, **npu),
        start(tmp_path / "broken", on_npu, "train.py", TRAINING, **npu, **fault),
        start(tmp_path / "session", session, "train_npu.py", SESSION),
    ]
    said = [(*run.communicate(), run.returncode) for run in runs]
    assert [code for *_, code in said] == [0, 0, 0], "\n".join(err[-2000:] for _, err, _ in said)
    cpu, run = unedited
    assert run.stdout == said[0][0] != said[1][0]
    same = trueup.compare(cpu, tmp_path / "npu/runs/npu")
    assert (same.verdict, same.unmatched) == ("aligned", [])
    digests = [[row["digest"] for row in rows_of(one)] for one in (cpu, tmp_path / "npu/runs/npu")]
    assert digests[0] == digests[1]
    monkeypatch.chdir(tmp_path / "broken")
    Path("runs/cpu").symlink_to(cpu)
    assert app.run(compared) == 1
    culprit, *_ = json.loads(Path("report/verdict.json").read_text())["culprits"]
    assert [culprit[name] for name in ("step", "phase", "scope", "op")] == [0, "backward", "first", "tf.raw_ops.Tanh"]
    out, err, _ = said[2]
    assert out.splitlines() == [
        "[1.] 1",
        "NpuOptimizer: precision_mode='allow_mix_precision' is not simulated in a session: must_keep_origin_dtype, "
        "allow_fp32_to_fp16, allow_fp32_to_bf16 are",
        "npu_bridge.NPURunConfig is not simulated: TensorFlow has no Estimator any more; train with a session or with Keras",
        "npu_bridge.NPUOptimizer(is_loss_scale=True) is not simulated: loss scaling in a graph is the device's own; train without "
        "it, or with Keras' LossScaleOptimizer",
    ]
    assert "NpuOptimizer knows no precison_mode and passes over it; it knows HCCL_algorithm, " in err


def test_options_are_checked_and_mixed_precision_is_keras_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from trueup.simdev.standins import npu_device

    options = npu_device.Options(npu_device.WHERE, {**dict.fromkeys(simulated.GLOBAL), **simulated.GROUPS})
    monkeypatch.setattr(npu_device, "_options", options)
    monkeypatch.setattr(npu_device, "_opened", {})
    with pytest.raises(ValueError, match=r"global_options\(\) has no option precison_mode; it has graph_run_mode, .*experimental$"):
        options.precison_mode = "force_fp16"
    with pytest.raises(ValueError, match=r"dump_config has no option path; it has enable_dump, dump_path, dump_step, dump_mode, "):
        options.dump_config.path = "here"
    with pytest.raises(ValueError, match=r"dump_config is a group of options: set one of enable_dump, .*dump_debug_mode$"):
        options.dump_config = True
    with pytest.raises(ValueError, match=r"precision_mode is 'fp16'; it may be must_keep_origin_dtype, "):
        options.precision_mode = "fp16"
    with pytest.raises(ValueError, match=r"fusion_switch_file names '.*none\.cfg', which is no file"):
        options.fusion_switch_file = str(tmp_path / "none.cfg")
    for name, value in (("precision_mode", "force_fp16"), ("precision_mode", "force_fp32"), ("modify_mixlist", "ops.json"),
                        ("op_select_implmode", "high_performance"), ("overflow_flag", 0)):  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"{name}={value!r} is not simulated: "):
            setattr(options, name, value)
    with pytest.raises(NotImplementedError, match="device writes no dump; `trueup capture -o DIR -- COMMAND` records"):
        options.dump_config.enable_dump = True
    options.dump_config.enable_dump = False
    options.experimental.multi_branches_config.dynamic_dims = "1;2"
    options.memory_config.static_memory_policy = 2
    with pytest.raises(RuntimeError, match=r"there is no device 3; there are 1 \(TRUEUP_SIMULATED_DEVICES\), from 0"):
        npu_device.open(3)
    monkeypatch.setenv("RANK_SIZE", "8")
    with pytest.raises(NotImplementedError, match="RANK_SIZE=8 is not simulated"):
        npu_device.open()
    monkeypatch.setenv("RANK_SIZE", "1")
    options.precision_mode = "allow_mix_precision"
    try:
        with pytest.warns(UserWarning, match="is Keras' mixed_float16 here, for layers built from now on"):
            opened = npu_device.open()
        assert npu_device.open() is opened
        layer = keras.layers.Dense(2)
        assert layer(tf.ones((1, 2))).dtype == tf.float16
        assert layer.kernel.dtype == "float32"
        with pytest.raises(NotImplementedError, match="is not simulated in mixed precision"), npu_device.keep_dtype_scope():
            pass
    finally:
        keras.config.set_dtype_policy("float32")
    scaled = npu_device.NpuLossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    assert isinstance(scaled, keras.optimizers.LossScaleOptimizer)
    with pytest.raises(NotImplementedError, match=r"NpuLossScaleOptimizer\(dynamic=False\) is not simulated"):
        npu_device.NpuLossScaleOptimizer(keras.optimizers.SGD(), dynamic=False)


def test_while_a_capture_runs_a_dump_is_asked_for_rightly(tmp_path: Path) -> None:
    with trueup.capture(tmp_path / "capture"):
        tf.constant([1.0]) + 1
        simulated.check("enable_dump", True, "here")


def test_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from trueup.simdev import tensorflow_faults

    monkeypatch.setenv("TRUEUP_SIMDEV_NOISE", "hf32-matmul")
    with pytest.raises(trueup.TrueupError, match="TensorFlow's simulated device has no noise"):
        simulated.begin()
    with pytest.raises(trueup.TrueupError, match="has no fault 'gelu-backward'; it has matmul-bf16-accumulation, "):
        tensorflow_faults.plant("gelu-backward")
    monkeypatch.setattr(tensorflow_faults, "planted", [SimpleNamespace(fired=[])])
    simulated._tell_if_idle("relu-backward-passes-all")
    assert "the fault relu-backward-passes-all changed nothing: in TensorFlow it breaks calls" in capsys.readouterr().err
