# ruff: noqa: E501 - tables
"""`trueup checkpoint`: broken checkpoints of many kinds repaired and loaded strictly, every format read, hostile files refused."""

from __future__ import annotations

import json
import pickle
import re
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup.doors.cli import main
from trueup.foundation.checkpoint.reading import Held
from trueup.foundation.model import TrueupError
from trueup.migration.checkpoint import compare, matched, open_checkpoint, repair, unflattened, unwrapped

torch = pytest.importorskip("torch")
PAGE = (Path(__file__).parents[2] / "docs/checkpoint.md").read_text("utf-8")


def net() -> Any:
    torch.manual_seed(3)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    return torch.nn.ModuleDict({"body": layers, "head": torch.nn.Linear(2, 5).to(torch.bfloat16)})


MODEL = net()
STATE = MODEL.state_dict()


def renamed(how: Callable[[str], str]) -> dict[str, Any]:
    return {how(name): tensor for name, tensor in STATE.items()}


def whole(path: Path, state: dict[str, Any]) -> None:
    optimizer = torch.optim.Adam(MODEL.parameters())
    for parameter in MODEL.parameters():
        parameter.grad = torch.ones_like(parameter)
    MODEL_BEFORE = {name: tensor.clone() for name, tensor in STATE.items()}
    optimizer.step()
    held = {"epoch": 3, "loss": 0.5, "arch": "net", "args": Namespace(lr=0.1), "state_dict": state, "optimizer": optimizer.state_dict()}
    for name, tensor in STATE.items():
        tensor.copy_(MODEL_BEFORE[name])
    torch.save(held, path)


def halves(name: str) -> str:
    return f"module.{name}" if name.startswith("body") else name


BROKEN: dict[str, Callable[[Path], Path]] = {}


def broken(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def made(folder: Path) -> Path:
        return make(folder) or folder / "broken.pt"

    BROKEN[make.__name__] = made
    return make


@broken
def ddp(folder: Path) -> None:
    torch.save(renamed(lambda name: f"module.{name}"), folder / "broken.pt")


@broken
def half_of_the_names(folder: Path) -> None:
    torch.save(renamed(halves), folder / "broken.pt")


@broken
def compiled(folder: Path) -> None:
    torch.save(renamed(lambda name: f"_orig_mod.{name}"), folder / "broken.pt")


@broken
def compiled_and_ddp(folder: Path) -> None:
    torch.save(renamed(lambda name: f"module._orig_mod.{name}"), folder / "broken.pt")


@broken
def fsdp_within(folder: Path) -> None:
    torch.save(renamed(lambda n: n.replace("body.", "_fsdp_wrapped_module.body._checkpoint_wrapped_module.")), folder / "broken.pt")


@broken
def training_state(folder: Path) -> Path:
    whole(folder / "broken.pth.tar", renamed(lambda name: f"module.{name}"))
    return folder / "broken.pth.tar"


@broken
def prefix_of_a_trainer(folder: Path) -> None:
    torch.save({"model": renamed(lambda name: f"learner.backbone.{name}")}, folder / "broken.pt")


@broken
def suffix(folder: Path) -> None:
    torch.save(renamed(lambda name: f"{name}_fp32"), folder / "broken.pt")


@broken
def beside_the_generators_state(folder: Path) -> None:
    model = renamed(lambda name: f"module._orig_mod.{name}")
    torch.save({"model": model, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
                "epoch": 3, "rng": torch.get_rng_state()}, folder / "broken.pt")  # fmt: skip


@broken
def before_pytorch_1_6(folder: Path) -> None:
    torch.save(renamed(lambda name: f"module.{name}"), folder / "broken.pt", _use_new_zipfile_serialization=False)


@broken
def shards(folder: Path) -> Path:
    from safetensors.torch import save_file

    names = list(STATE)
    index = {}
    for at in range(2):
        part = {f"module.{name}": STATE[name].contiguous() for name in names[at::2]}
        save_file(part, folder / f"model-{at}.safetensors")
        index |= dict.fromkeys(part, f"model-{at}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@broken
def distributed(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": renamed(lambda name: f"_orig_mod.{name}")}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@broken
def megatron_ranks(folder: Path) -> Path:
    for rank in range(2):
        state = {}
        for name, tensor in STATE.items():
            state[f"module.{name}"] = tensor.chunk(2)[rank].clone() if tensor.ndim else tensor
        place = folder / f"mp_rank_{rank:02d}"
        place.mkdir()
        torch.save({"model": state, "iteration": 7}, place / "model_optim_rng.pt")
    return folder


def ranks(folder: Path, state_of: Callable[[int], dict[str, Any]]) -> Path:
    """Save what each of two ranks holds, without a second process: the group is one whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            torch.save(state_of(rank), folder / f"model_world_size_2_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return folder


def cut(tensor: Any, rank: int) -> Any:
    from torch.distributed.distributed_c10d import _get_default_group
    from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

    return _create_chunk_sharded_tensor(tensor, rank, 2, 1, _get_default_group())


def fsdp_flat(rank: int, orig: bool = False) -> dict[str, Any]:
    """Return what FSDP1's LOCAL_STATE_DICT holds where ``body.3``, ``body`` and ``head`` are wrapped (read off two real ranks)."""
    state: dict[str, Any] = {name: tensor for name, tensor in STATE.items() if "running" in name or "tracked" in name}
    for unit in ("body.3.", "body.", "head."):
        rows = [one for name, one in net().named_parameters() if name.startswith(unit) and (unit != "body." or name[5] != "3")]
        step = 16 // rows[0].itemsize if orig else 1
        flat = torch.cat([torch.nn.functional.pad(one.detach().flatten(), (0, -one.numel() % step)) for one in rows])
        flat = flat[: flat.numel() - -rows[-1].numel() % step]
        state[f"{unit}_flat_param"] = cut(torch.nn.functional.pad(flat, (0, flat.numel() % 2 if orig else 0)), rank)
    if orig:  # what each rank holds of a parameter stands beside, in one row
        state |= {"head.weight": STATE["head.weight"].flatten()[: 10 if rank == 0 else 0], "body.3.weight": torch.ones(4)}
    return state


def sharded(rank: int) -> dict[str, Any]:
    return {f"_orig_mod.{name}": cut(tensor, rank) if tensor.ndim else tensor for name, tensor in STATE.items()}


def distributed_tensors(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, found = DeviceMesh("cpu", [0, 1]), {}
    for name, tensor in STATE.items():
        place = Shard(tensor.ndim - 1) if tensor.ndim > 1 else Replicate()
        local = tensor.chunk(2, tensor.ndim - 1) if tensor.ndim > 1 else (tensor, tensor)
        piece = local[rank].clone()
        stride = tensor.stride()
        found[f"module.{name}"] = DTensor.from_local(piece, mesh, [place], run_check=False, shape=tensor.shape, stride=stride)
    return found


BROKEN |= {
    "fsdp_flat": lambda folder: ranks(folder, fsdp_flat),
    "fsdp_flat_with_the_original_parameters": lambda folder: ranks(folder, lambda rank: fsdp_flat(rank, True)),
    "fsdp_sharded": lambda folder: ranks(folder, sharded),
    "fsdp_dtensor": lambda folder: ranks(folder, distributed_tensors),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_repaired_and_loads_strictly(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.save(STATE, tmp_path / "model.pt")
    work = tmp_path / "work"
    work.mkdir()
    source = BROKEN[name](work)
    found = repair(source, tmp_path / "fixed.safetensors", like=tmp_path / "model.pt")
    assert (found.exit_code, found.missing, found.unexpected, found.shapes) == (0, (), (), ())
    assert len(found.renamed) == (0 if "flat" in name else 9 if name in ("half_of_the_names", "fsdp_within") else len(STATE))
    model = net()
    model.load_state_dict(load_file(tmp_path / "fixed.safetensors"), strict=True)
    assert all(torch.equal(one, STATE[key]) for key, one in model.state_dict().items())


def test_ranks_of_megatron_are_joined(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole_ = {"layers.0.attention.linear_qkv.weight": rng.normal(size=(6, 4)), "layers.0.attention.linear_proj.weight": rng.normal(size=(4, 6)),
              "layers.0.norm.weight": rng.normal(size=4), "layers.0.attention.linear_proj.bias": rng.normal(size=4),
              "layers.1.attention.linear_qkv.weight": rng.normal(size=(6, 4)), "embedding.weight": rng.normal(size=(8, 4))}
    for stage in range(2):
        for rank in range(2):
            state = {}
            for name, array in whole_.items():
                if f"layers.{stage}" in name or (stage == 0 and "embedding" in name):
                    dim = 1 if name.endswith("proj.weight") else 0
                    one = array if "norm" in name or name.endswith("bias") else np.split(array, 2, dim)[rank]
                    state[name.replace("layers.1", "layers.0")] = torch.from_numpy(one.copy())
            place = tmp_path / f"mp_rank_{rank:02d}_{stage:03d}"
            place.mkdir()
            torch.save({"model": {"language_model": state}, "args": Namespace(x=1)}, place / "model_optim_rng.pt")
    found = open_checkpoint(tmp_path)
    part = found.part(None)
    assert {name.removeprefix("language_model.") for name in part} == set(whole_)
    assert all(np.array_equal(part[f"language_model.{name}"].read(), array) for name, array in whole_.items())
    (tmp_path / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    (tmp_path / "mp_rank_01_001").rmdir()
    with pytest.raises(TrueupError, match="rank 1 of tensor parallelism in stage 1 is missing"):
        open_checkpoint(tmp_path)


def expert_ranks(folder: Path, kind: str, whole_: dict[str, Any], arguments: Any) -> None:
    """Write two ranks of tensor parallelism times two of experts, each with two of four experts."""
    for rank in range(2):
        for expert in range(2):
            state = {}
            for name, array in whole_.items():
                number = re.search(r"(?<=experts\.)\d+|(?<=weight)\d$", name)
                if number and int(number[0]) // 2 != expert:
                    continue
                at = str(int(number[0]) % 2) if number else ""
                new = name[: number.start()] + at + name[number.end() :] if number else name
                one = array
                if "linear_fc1" in name:  # gate and up halves, each cut
                    one = np.concatenate([np.split(half, 2)[rank] for half in np.split(array, 2)])
                elif "linear_fc2" in name:
                    one = np.split(array, 2, 1)[rank]
                state[f"{new}"] = torch.from_numpy(one.copy())
            place = folder / f"mp_rank_{rank:02d}_{expert:03d}"
            place.mkdir(parents=True)
            torch.save({"model": state, "args": arguments}, place / "model_optim_rng.pt")


def test_expert_ranks_of_megatron_are_joined(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    said = Namespace(swiglu=True, pipeline_model_parallel_size=1, expert_tensor_parallel_size=2)
    for kind, names in (("sequential", "local_experts.{}.linear_fc{}.weight"), ("grouped", "linear_fc{1}.weight{0}")):
        names = f"decoder.layers.0.mlp.experts.{names}"
        whole_ = {names.format(at, fc): rng.normal(size=(8, 4) if fc == 1 else (4, 4)) for at in range(4) for fc in (1, 2)}
        whole_["decoder.layers.0.mlp.router.weight"] = rng.normal(size=(4, 4))
        expert_ranks(tmp_path / kind, kind, whole_, said)
        found = open_checkpoint(tmp_path / kind)
        assert (found.kind, found.notes[1:]) == ("Megatron, tensor parallel 2, pipeline parallel 1, expert parallel 2", [])
        part = found.part(None)
        assert set(part) == set(whole_)
        assert all(np.array_equal(part[name].read(), array) for name, array in whole_.items())
    torch.save({"model": {"decoder.layers.0.mlp.router.weight": torch.ones(4, 4)}}, tmp_path / "x.pt")
    file = tmp_path / "grouped" / "mp_rank_00_001" / "model_optim_rng.pt"
    held = torch.load(file, weights_only=False)
    held["model"]["decoder.layers.0.mlp.router.weight"] += 1
    torch.save(held, file)
    with pytest.raises(ValueError, match="should hold the same decoder"):
        open_checkpoint(tmp_path / "grouped").part(None)["decoder.layers.0.mlp.router.weight"].read()
    file.unlink()
    with pytest.raises(TrueupError, match="mp_rank_00_001 holds no file of weights"):
        open_checkpoint(tmp_path / "grouped")


def test_what_ranks_lack_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    ranks(tmp_path / "a", sharded)
    file = tmp_path / "a/model_world_size_2_rank_0.pt"
    with pytest.raises(TrueupError, match="the files of all ranks belong in one folder"):
        repair(file, tmp_path / "x.safetensors")
    file.unlink()
    with pytest.raises(TrueupError, match="the file of rank 0 is missing"):
        open_checkpoint(tmp_path / "a")
    flat = {"_flat_param": Held((9,), "float32", lambda: np.zeros(9, np.float32))}
    with pytest.raises(TrueupError, match="expected: the 8 elements"):
        unflattened(flat, {"w": Held((2, 4), "float32", lambda: np.zeros((2, 4)))}, "a.pt")


def test_an_optimizer_is_a_part_and_what_is_no_tensor_is_left_out(tmp_path: Path) -> None:
    whole(tmp_path / "a.pth.tar", STATE)
    found = open_checkpoint(tmp_path / "a.pth.tar")
    assert list(found.parts) == ["state_dict", "optimizer"]
    assert (found.values["epoch"], found.foreign, found.model) == ("3", ("argparse.Namespace",), "state_dict")
    done = repair(tmp_path / "a.pth.tar", tmp_path / "optimizer.safetensors", part="optimizer")
    assert (done.exit_code, done.part) == (2, "optimizer")
    assert "state.0.exp_avg" in open_checkpoint(tmp_path / "optimizer.safetensors").part("")
    with pytest.raises(TrueupError, match="no such part"):
        repair(tmp_path / "a.pth.tar", tmp_path / "x.safetensors", part="ema")


class Harmful:
    def __init__(self, what: Callable[..., Any], argument: str) -> None:
        self.what, self.argument = what, argument

    def __reduce__(self) -> Any:
        return self.what, (self.argument,)


@pytest.mark.parametrize("what", [eval, exec, __import__("os").system, __import__("subprocess").getoutput, __import__("shutil").rmtree])
def test_a_hostile_file_is_refused(what: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "ran"
    for name, legacy in (("a.pt", False), ("b.pt", True)):
        torch.save({"w": torch.ones(2), "x": Harmful(what, f"touch {marker}")}, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        assert main(["checkpoint", "inspect", str(tmp_path / name)]) == 2
        assert "which would run when the file is loaded" in capsys.readouterr().err
    (tmp_path / "c.pdparams").write_bytes(pickle.dumps({"x": Harmful(what, f"touch {marker}")}))
    with pytest.raises(TrueupError, match="would run"):
        open_checkpoint(tmp_path / "c.pdparams")
    assert not marker.exists()


def test_damaged_files_get_a_sentence(tmp_path: Path) -> None:
    good = tmp_path / "good.pt"
    torch.save(STATE, good)
    data = good.read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[: len(data) // 2])
    (tmp_path / "lfs.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n" + b"x" * 40)
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "odd.pt").write_bytes(b"hello" * 40)
    (tmp_path / "list.pt").write_bytes(pickle.dumps([1, 2]))
    nested: Any = [0] * 100
    for _ in range(9):
        nested = [nested] * 100
    (tmp_path / "nested.pt").write_bytes(pickle.dumps({"a": nested}))
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{" + b" " * 64)
    head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}}).encode()
    (tmp_path / "outside.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 8)
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("readme.txt", "x")
    for path in [one for one in tmp_path.iterdir() if one.name != "good.pt"]:
        with pytest.raises(TrueupError, match="A checkpoint cannot be read"):
            open_checkpoint(path)
    (tmp_path / "some").mkdir()
    for path in (tmp_path / "some", tmp_path / "none.pt"):
        with pytest.raises(TrueupError, match="A checkpoint cannot be read"):
            open_checkpoint(path)


def test_strides_views_and_dtypes_are_read_as_pytorch_does(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    held = {"t": base.T, "s": base[1:3, ::2], "e": torch.empty(0, 3), "b": torch.ones(3, dtype=torch.bfloat16), "i": torch.tensor(7),
            "z": torch.zeros(1).expand(5), "c": torch.ones(2, dtype=torch.complex64), "p": torch.nn.Parameter(torch.ones(2)),
            "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(), "neg": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
            "f8": torch.arange(4.0).to(torch.float8_e4m3fn), "u16": torch.from_numpy(np.arange(5, dtype=np.uint16))}
    torch.save(held, tmp_path / "a.pt")
    part = open_checkpoint(tmp_path / "a.pt").part(None)
    for name, tensor in held.items():
        assert part[name].shape == tuple(tensor.shape)
        assert part[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert np.array_equal(part[name].read().astype(np.complex128), tensor.detach().to(torch.complex128).numpy())
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "b.pt")
    with pytest.raises(TrueupError, match="it claims 4,398,046,511,104 bytes"):
        open_checkpoint(tmp_path / "b.pt")
    np.savez(tmp_path / "a.npz", w=np.ones((2, 3), np.float32))
    assert open_checkpoint(tmp_path / "a.npz").part(None)["w"].shape == (2, 3)
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps({"w": np.ones(3, np.float32), "StructuredToParameterName@@": {"w": "w_0"}}, 2))
    assert list(open_checkpoint(tmp_path / "a.pdparams").part(None)) == ["w"]


def test_keras(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.ones((2, 3), np.float32)
        file["optimizer/vars/0"] = np.zeros(2)
    found = open_checkpoint(tmp_path / "m.weights.h5")
    assert {name: list(part) for name, part in found.parts.items()} == {"": ["layers.dense.vars.0"], "optimizer": ["vars.0"]}


def test_two_checkpoints_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    torch.save(renamed(lambda name: f"module.{name}"), tmp_path / "b.pt")
    found = compare(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (found.exit_code, found.equal, found.renamed) == (0, len(STATE), len(STATE))
    other = {**STATE, "head.bias": STATE["head.bias"] + 1, "extra": torch.ones(1)}
    del other["body.3.bias"]
    torch.save(other, tmp_path / "c.pt")
    found = compare(tmp_path / "a.pt", tmp_path / "c.pt")
    assert (found.exit_code, [one.name for one in found.differences], found.only) == (1, ["head.bias"], (("body.3.bias",), ("extra",)))
    assert found.document()["differences"][0]["largest"] == pytest.approx(1.0, rel=0.01)
    first, second = (str(tmp_path / name) for name in ("a.pt", "c.pt"))
    assert main(["checkpoint", "compare", first, second]) == 1
    assert f"trueup checkpoint repair {second} --like {first} -o fixed.safetensors" in capsys.readouterr().out


def test_names() -> None:
    assert unwrapped(["module.a", "a"]) == {"module.a": "module.a", "a": "a"}  # two names never become one
    assert unwrapped(["module.module.a"]) == {"module.module.a": "a"}
    assert unwrapped(["x.module.a", "module"]) == {"x.module.a": "x.module.a", "module": "module"}
    assert matched({"m.a.w": (2,), "m.b.w": (2,)}, {"a.w": (2,), "b.w": (3,)}) == {"m.a.w": "a.w"}
    assert matched({"a.w": (2,)}, {"model.a.w": (2,)}) == {"a.w": "model.a.w"}
    own = {"module.w": (2,), "a.w": (2,)}  # a layer that is called as a wrapper is
    assert matched({"module.w.value": (2,), "a.w.value": (2,)}, own) == {"module.w.value": "module.w", "a.w.value": "a.w"}
    assert matched({"module.w": (2,), "module.a.w": (2,)}, own) == {"module.w": "module.w", "module.a.w": "a.w"}


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    torch.save(STATE, tmp_path / "a.pt")
    assert main(["checkpoint", "repair", str(tmp_path / "a.pt"), "-o", str(tmp_path / "b.pt")]) == 2
    assert "a new file that ends in .safetensors" in capsys.readouterr().err
    (tmp_path / "b.safetensors").write_bytes(b"")
    assert main(["checkpoint", "repair", str(tmp_path / "a.pt"), "-o", str(tmp_path / "b.safetensors")]) == 2
    assert "a file that exists" in capsys.readouterr().err
    other = {**STATE, "head.bias": torch.ones(9)}
    torch.save(other, tmp_path / "o.pt")
    assert main(["checkpoint", "repair", str(tmp_path / "a.pt"), "-o", str(tmp_path / "c.safetensors"), "--like", str(tmp_path / "o.pt")]) == 1
    assert "1 of another shape" in capsys.readouterr().out


def test_the_page_s_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[0] for kind in ("python", "console"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    exec(code, {})
    assert main(["checkpoint", "repair", "checkpoint.pth.tar", "--like", "model.pt", "-o", "fixed.safetensors", "--json", "out.json"]) == 0
    out = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert shown.partition("\n")[2].strip() in out
    assert json.loads(Path("out.json").read_text())["strict"] is True
    assert main(["checkpoint", "inspect", "checkpoint.pth.tar", "--json", "in.json"]) == 0
    assert main(["checkpoint", "compare", "checkpoint.pth.tar", "fixed.safetensors"]) == 0


def test_an_optimizers_part_is_held_against_that_of_another(tmp_path: Path) -> None:
    beside_the_generators_state(tmp_path)
    found = repair(tmp_path / "broken.pt", tmp_path / "fixed.safetensors", like=tmp_path / "broken.pt", part="optimizer")
    assert (found.exit_code, found.missing, found.unexpected) == (0, (), ())
    assert found.left == (f"model ({len(STATE)} tensors)", "rng (1 tensor)", "optimizer.param_groups", "epoch")
    with pytest.raises(TrueupError, match="expected: no --part, for this file's tensors stand by themselves"):
        open_checkpoint(tmp_path / "fixed.safetensors").part("optimizer")
