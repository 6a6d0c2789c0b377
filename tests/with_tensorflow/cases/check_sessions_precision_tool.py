"""The third document's blocks, pasted into a training of TensorFlow 1 and run; then its command line, and what that lists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import digits_resnet
import pytest
from recording import WARM

ROOT = Path(__file__).parents[3]
OLD_NAMES = ROOT / "compat-packages/src/trueup_compat/old_names"
DOCUMENT = ROOT / "tests" / "compat" / "documents" / "precision_tool.txt"
QUOTES = str.maketrans({"‘": "'", "’": "'"})


def blocks() -> dict[str, str]:
    parts = DOCUMENT.read_text("utf-8").split("=== ")[1:]
    return {name: body for name, _, body in (part.partition("\n") for part in parts)}


def pasted(name: str) -> str:
    """Return the training with a block in it: the page lost indentation and made quotes; ``sess.run(...)`` is the training's."""
    first, *rest = blocks()[name].translate(QUOTES).strip().splitlines()
    if name == "baseline":
        rest = ["with tf.Session(config=config) as sess:", *(f"    {line}" for line in rest), "    sess.run(...)"]
    session = "\n".join("    train(sess)" if line.strip() == "sess.run(...)" else line for line in rest)
    return digits_resnet.SCRIPT.format(imports=first, session=session)


def environment() -> dict[str, str]:
    paths = [str(OLD_NAMES), str(ROOT / "compat-packages" / "src"), str(ROOT / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100", "XDG_STATE_HOME": os.devnull}


DRIVER = """
import atexit, os, runpy, sys, traceback
import sklearn.datasets, tensorflow, trueup.recording.adapters.tensorflow.session

for script, fault in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, script
        continue
    for stream, ending in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(script + ending, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(os.path.dirname(script))
    sys.argv, code = [script, fault], 0
    try:
        runpy.run_path(script, run_name="__main__")
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)
"""
"""Runs scripts, each in a process of its own that need not import TensorFlow again."""

FAULTS = {"baseline": "none", "candidate": "backward", "overflow": "overflow"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the three trainings: the first two in the folder ``network``, the third in ``overflow``."""
    folder = tmp_path_factory.mktemp("document")
    command = [WARM, "-c", DRIVER]
    for block, fault in FAULTS.items():
        script = folder / ("overflow" if block == "overflow" else "network") / f"{block}.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(pasted(block), "utf-8")
        command += [str(script), fault]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True)
    errors = "".join(path.read_text() for path in folder.rglob("*.err"))
    assert ran.returncode == 0, ran.stdout + ran.stderr + errors
    return folder


def prompt(folder: Path, block: str) -> subprocess.CompletedProcess[str]:
    """Type what a block of the document shows at its prompt."""
    shell, *lines = blocks()[block].splitlines()
    typed = "".join(f"{line.removeprefix('PrecisionTool > ')}\n" for line in lines)
    program, script = shlex.split(shell)
    assert program == "python3"
    cli = OLD_NAMES / script
    return subprocess.run([WARM, cli], cwd=folder, env=environment(), input=typed, capture_output=True, text=True)


def test_whole_network_comparison(trained: Path) -> None:
    folder = trained / "network"
    assert "Set tensorflow seed 2022" in (folder / "baseline.py.out").read_text()
    assert "precision_data/tf/dump" in (folder / "baseline.py.err").read_text()
    assert [(folder / f"{block}.py.out").read_text().count("loss") for block in ("baseline", "candidate")] == [3, 3]
    ran = prompt(folder, "compare")
    assert (ran.returncode, ran.stderr) == (1, "")
    assert "DEVIATES  first culprit: block1, backward, step 0, rank 0  (tf.raw_ops.PyFunc)" in " ".join(ran.stdout.split("\n"))
    panels = re.findall(r"^╭─ (\d+)  (\S+)  (\S+)#\d+  (\w+), step 0", ran.stdout, re.MULTILINE)
    assert [number for number, *_ in panels] == [str(k) for k in range(1, len(panels) + 1)]
    assert panels[0][1:] == ("block1", "tf.raw_ops.PyFunc", "backward")
    assert len(panels) == 10
    cosines = [float(value) for value in re.findall(r"output\.0 (-?\d\.\d+)", ran.stdout)]
    assert cosines
    assert all(value <= 0.98 for value in cosines)
    assert re.search(r"^\d+ calls with an output whose cosine is 0\.98 or less", ran.stdout, re.MULTILINE)


def test_overflow(trained: Path) -> None:
    assert "block1, forward, step 0, rank 0 (tf.raw_ops.PyFunc)" in (trained / "overflow" / "overflow.py.err").read_text()
    ran = prompt(trained / "overflow", "analyse")
    assert ran.returncode == 1
    assert re.search(r"^overflow.*\n +.*block1.*\n?.*tf\.raw_ops\.PyFunc", ran.stdout, re.MULTILINE), ran.stdout + ran.stderr


@pytest.mark.parametrize("action", ["fusion_off|dump", "overflow|dump", None])
def test_what_is_written_into_the_config(tmp_path: Path, action: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trueup_compat.precision_tool.recording.begin", lambda actions: None)
    from trueup_compat.precision_tool import tf_config

    if action is None:
        monkeypatch.setenv("PRECISION_TOOL_DUMP", "True")
    for name in ("DUMP_GE_GRAPH", "DUMP_GRAPH_LEVEL", "DUMP_GRAPH_PATH", "NPU_DUMP_GRAPH"):
        monkeypatch.setenv(name, "")
    config = tf_config.session_dump_config(None, action)
    (optimizer,) = config.graph_options.rewrite_options.custom_optimizers
    assert optimizer.name == "NpuOptimizer"
    told = optimizer.parameter_map
    assert told["use_off_line"].b
    assert config.graph_options.rewrite_options.remapping == tf_config.OFF
    data = tmp_path / "precision_data"
    if action == "overflow|dump":
        assert told["enable_dump_debug"].b
        assert (told["dump_debug_mode"].s, told["dump_path"].s) == (b"all", str(data / "overflow" / "dump").encode())
        assert "enable_dump" not in told
    else:
        assert told["enable_dump"].b
        assert (told["dump_step"].s, told["dump_mode"].s) == (b"0", b"all")
        assert told["dump_path"].s == str(data / "npu" / "debug_0" / "dump").encode()
        assert ("fusion_switch_file" in told) == (action == "fusion_off|dump")
        assert os.environ["DUMP_GE_GRAPH"] == "2"
    if action == "fusion_off|dump":
        assert (data / "fusion" / "fusion_off.cfg").read_text().split() == (
            '{ "Switch": { "GraphFusion": { "ALL": "off" }, "UBFusion": { "ALL": "off" } } }'.split()
        )
        assert config.graph_options.rewrite_options.layout_optimizer == tf_config.OFF
    again = tf_config.session_dump_config(config, action)
    assert len(again.graph_options.rewrite_options.custom_optimizers) == 1


def test_other_entrances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from trueup.foundation.model import TrueupError
    from trueup_compat.precision_tool import config, tf_config
    from trueup_compat.precision_tool.keys import actions_of

    monkeypatch.chdir(tmp_path)
    begun: list[tuple[str, ...]] = []
    monkeypatch.setattr("trueup_compat.precision_tool.recording.begin", begun.append)
    dump = tf_config.estimator_dump_config("dump")
    assert (dump.enable_dump, dump.dump_mode, dump.dump_step) == (True, "all", "0")
    options = SimpleNamespace(dump_config=SimpleNamespace(), profiling_config=SimpleNamespace())
    device = SimpleNamespace(global_options=lambda: options)
    assert tf_config.npu_device_dump_config(device, "dump|fusion_switch|prof") is device
    assert options.dump_config.enable_dump
    assert options.dump_config.dump_mode == "all"  # the tool set dump_debug_mode here
    assert options.profiling_config.enable_profiling
    assert Path(options.fusion_switch_file).exists()
    assert tf_config.npu_device_dump_config(None, "overflow") is None
    assert begun == [("dump",), ("dump", "fusion_switch", "prof"), ("overflow",)]
    with pytest.raises(TrueupError, match="action 'dmup' is unknown"):
        actions_of("dmup")
    monkeypatch.setattr(config, "TF_DUMP_STEP", "0|5|10")
    assert config.steps() == "0,5,10"


def test_the_command_line_without_a_prompt(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trueup.foundation.model import TrueupError
    from trueup_compat.precision_tool import cli, config

    monkeypatch.setattr(config, "ROOT_DIR", "")
    monkeypatch.chdir(trained)
    with pytest.raises(TrueupError, match="There is nothing to look at"):
        cli.run(["ac"])
    assert cli.run(["data", str(trained / "network"), "vector_compare"]) == 1
    (table,) = (trained / "network" / "precision_data" / "temp" / "vector_compare").glob("*/result_*.csv")
    capsys.readouterr()
    assert cli.run(["vcs", "-f", str(table), "-c", "0.98", "-l", "1"]) == 1
    assert "block1/tf.raw_ops.PyFunc" in capsys.readouterr().out
    assert cli.run(["npu_dump", sys.executable, "-c", "import os, sys; sys.exit(os.environ['PRECISION_TOOL_DUMP'] != 'True')"]) == 0
    for words, said in ((["tf_dump"], "needs the training"), (["npu_overflow"], "no training"), (["data"], "needs the folder")):
        with pytest.raises(TrueupError, match=said):
            cli.run(words)


def test_npy_files_that_the_tool_left_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    from trueup_compat.precision_tool import cli, config

    monkeypatch.setattr(config, "ROOT_DIR", "")
    for k, folder in enumerate(("tf/dump", "npu/debug_0/dump/20261122")):
        (tmp_path / "precision_data" / folder).mkdir(parents=True)
        values = np.arange(1, 9, dtype=np.float32) * (-1) ** k
        np.save(tmp_path / "precision_data" / folder / "conv1_Conv2D.0.1589195081588018.npy", values)
    assert cli.run(["data", str(tmp_path), "vcs"]) == 1
    assert "conv1_Conv2D" in capsys.readouterr().out
    assert (tmp_path / "precision_data" / "temp" / "imported" / "npu" / "manifest.json").exists()
    assert cli.run(["data", str(tmp_path / "precision_data"), "vcs"]) == 1


def test_an_earlier_run_is_replaced_by_one_process_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow.compat.v1 as tf

    from trueup.foundation.model import TrueupError
    from trueup_compat.precision_tool import config, recording, tf_config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "ROOT_DIR", "")
    for value in (1.0, 2.0):
        with tf.Graph().as_default(), tf.Session() as session:
            x = tf.placeholder(tf.float32, [2])
            same = tf_config.sess_dump(session)
            assert same is session
            assert session.run(x * value, {x: [1.0, 2.0]}).tolist() == [value, 2 * value]
            recording.end()
    import trueup

    rows = trueup.open_capture(config.baseline()).records(["op", "slot", "max", "value"]).to_pylist()
    (argument,) = (row["value"] for row in rows if row["op"].endswith("Mul") and row["value"])  # written down, no input
    assert json.loads(argument)["input.1"] == 2.0
    assert not any(row["slot"] == "input.1" for row in rows)
    assert [row["max"] for row in rows if row["op"].endswith("Mul") and row["slot"] == "output.0"] == [4.0]
    monkeypatch.setattr("trueup.recording.adapters.tensorflow.session.rank_and_world", lambda: (0, 2))
    with pytest.raises(TrueupError, match="siblings may be writing there"):
        tf_config.sess_dump(None)
    (tmp_path / "precision_data" / "tf" / "dump" / "manifest.json").unlink()
    (tmp_path / "precision_data" / "tf" / "dump" / "mine.txt").write_text("")
    monkeypatch.setattr("trueup.recording.adapters.tensorflow.session.rank_and_world", lambda: (None, 1))
    with pytest.raises(TrueupError, match="no capture"):
        tf_config.sess_dump(None)
