from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from trueup import TrueupError
from trueup.analysis.pairing.proposing import read_state, write_state

STATE = {"fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "fc.bias": np.ones(2, np.float64)}


@pytest.mark.parametrize("name", ["w.npz", "w.safetensors"])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    found = read_state(write_state(STATE, tmp_path / name))
    assert found.keys() == STATE.keys()
    for key, value in STATE.items():
        np.testing.assert_array_equal(found[key], value)
        assert found[key].dtype == value.dtype


def test_torch(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "w.pt")
    found = read_state(tmp_path / "w.pt")
    np.testing.assert_array_equal(found["a"], [0, 1, 2])
    assert found["b"].dtype.name == "bfloat16"


def test_of_a_training_s_checkpoint_the_model(tmp_path: Path) -> None:
    held = {"epoch": 3, "state_dict": {"a": torch.arange(3.0)}, "optimizer": {"a": torch.ones(3)}}
    torch.save(held, tmp_path / "w.pt")
    assert list(read_state(tmp_path / "w.pt")) == ["a"]


@pytest.mark.parametrize("protocol", [4, 5])
def test_paddle(tmp_path: Path, protocol: int) -> None:
    held = {"fc.weight": STATE["fc.weight"], "StructuredToParameterName@@": {"fc.weight": "linear_0.w_0"}}
    (tmp_path / "w.pdparams").write_bytes(pickle.dumps(held, protocol))
    found = read_state(tmp_path / "w.pdparams")
    np.testing.assert_array_equal(found["fc.weight"], held["fc.weight"])
    assert list(found) == ["fc.weight"]


class Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("never"),)


@pytest.mark.parametrize(
    "held", [{"a": Runs()}, {"a": np.array([Runs()], object)}, Runs(), {"a": {1, 2}}, [1], {"a": np.dtype("O")}]
)
def test_a_pickle_runs_nothing(tmp_path: Path, held: object) -> None:
    path = tmp_path / "w.pdparams"
    path.write_bytes(pickle.dumps(held))
    with pytest.raises(TrueupError, match=r"cannot be read|Which part"):
        read_state(path)
    assert not Path("never").exists()


def test_an_array_cannot_be_asked_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "w.pdparams"
    path.write_bytes(b"cnumpy\nndarray\n((J\xff\xff\xff\x7fJ\xff\xff\xff\x7ftt(R.")
    with pytest.raises(TrueupError, match="cannot be read"):
        read_state(path)


@pytest.mark.parametrize("name", ["w.npz", "w.safetensors", "w.pt", "w.pdparams"])
def test_a_damaged_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no weights at all, only some bytes")
    with pytest.raises(TrueupError, match="cannot be read"):
        read_state(tmp_path / name)


def test_what_is_no_file_of_weights(tmp_path: Path) -> None:
    with pytest.raises(TrueupError, match="No such file"):
        read_state(tmp_path / "w.npz")
    (tmp_path / "w.txt").write_text("text")
    with pytest.raises(TrueupError, match="no head of a kind that is known"):
        read_state(tmp_path / "w.txt")
    with pytest.raises(TrueupError, match="written as"):
        write_state(STATE, tmp_path / "w.pt")
    write_state(STATE, tmp_path / "w.npz")
    with pytest.raises(TrueupError, match="exists"):
        write_state(STATE, tmp_path / "w.npz")
