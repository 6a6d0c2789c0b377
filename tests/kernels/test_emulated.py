"""The NEON kernel, cross-compiled and run under qemu where both are installed (gcc-aarch64-linux-gnu, qemu-user)."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash

from trueup.foundation.kernels import KINDS, _compiled, _pair
from trueup.foundation.model import PACKED

from . import oracle
from .test_summarize import as_the_twin, close

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
NATIVE = Path(_compiled.__file__).parent / "native"

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None, reason=f"needs {COMPILER} and {EMULATOR}"
)


def built(folder: Path, source: str) -> Path:
    program = folder / "driver"
    sources = [Path(__file__).parent / source, NATIVE / "level_128.c", NATIVE / "tables.c"]
    flags = ["-O3", "-static", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}"]
    subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(program), "-lm"], check=True)
    return program


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("aarch64"), "driver.c")


@pytest.fixture(scope="module")
def pair_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("aarch64"), "pair_driver.c")


def emulated(driver: Path, arrays: list[np.ndarray], step: int = 1) -> list[tuple[np.ndarray, int]]:
    """Measure every ``step``-th element of 1-d arrays."""
    cases = []
    for array in arrays:
        head = np.array([KINDS[array.dtype.name], array[::step].size, step, array.nbytes])
        cases.append(head.tobytes() + array.tobytes())
    result = subprocess.run([EMULATOR, str(driver)], input=b"".join(cases), stdout=subprocess.PIPE, check=True).stdout
    rows = np.frombuffer(result).reshape(len(arrays), 1 + PACKED)
    return [(row[1:], int(row[:1].view(np.uint64)[0])) for row in rows]


def test_every_dtype_and_length(driver: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = []
    for dtype in (d for d in oracle.DTYPES if d.name in KINDS):
        for size in (0, 1, 3, 63, 64, 65, 257, 512, 513, 1100):
            raw = generator.integers(0, 2 if dtype.kind == "b" else 256, size * dtype.itemsize, np.uint8)
            arrays.append(raw.view(dtype))  # every bit pattern: NaN, Inf, subnormals
            with np.errstate(all="ignore"):
                arrays.append((generator.standard_normal(size) * 5).astype(dtype))
    for (out, digest), array in zip(emulated(driver, arrays), arrays, strict=True):
        close(out, oracle.summary(array), array)
        assert digest == xxhash.xxh3_64_intdigest(array.tobytes())


def test_digest_of_every_length(driver: Path) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 1400, np.uint8)
    arrays = [raw[:size] for size in range(1400)]
    for (_, digest), array in zip(emulated(driver, arrays), arrays, strict=True):
        assert digest == xxhash.xxh3_64_intdigest(array.tobytes())


@pytest.mark.parametrize("step", [1, 3])
def test_large_and_strided(driver: Path, step: int) -> None:
    array = np.random.default_rng(2).standard_normal(100_000)
    arrays = [array.astype(dtype) for dtype in ("float32", "float16", ml_dtypes.bfloat16, "complex64")] + [array, array * 1e300]
    for (out, digest), case in zip(emulated(driver, arrays, step), arrays, strict=True):
        as_the_twin(out, case[::step])
        assert digest == xxhash.xxh3_64_intdigest(case[::step].tobytes())


def pairs() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(3)
    found = []
    names = ("float32", "float64", "float16", "bfloat16", "float8_e5m2", "int64", "uint64", "int8", "bool")
    for first, second in itertools.product(names, names):
        for size in (1, 65, 2049, 40_000):
            values = generator.standard_normal(size) * 50
            with np.errstate(all="ignore"):
                a, b = (np.round(each).astype(getattr(ml_dtypes, name, name)) if "int" in name
                        else each.astype(getattr(ml_dtypes, name, name))
                        for name, each in ((first, values), (second, values + generator.standard_normal(size))))  # fmt: skip
            if size == 65 and first != "bool":
                a = generator.integers(0, 256, a.nbytes, np.uint8).view(a.dtype)  # NaN, Inf, subnormals
            found.append((a, b))
    return found


def test_pairs(pair_driver: Path) -> None:
    cases = pairs()
    heads = [np.array([KINDS[a.dtype.name], KINDS[b.dtype.name], a.size, a.nbytes, b.nbytes]) for a, b in cases]
    sent = b"".join(head.tobytes() + a.tobytes() + b.tobytes() for head, (a, b) in zip(heads, cases, strict=True))
    result = subprocess.run([EMULATOR, str(pair_driver)], input=sent, stdout=subprocess.PIPE, check=True).stdout
    want = np.empty(_pair.PACKED)
    for got, (a, b) in zip(np.frombuffer(result).reshape(len(cases), -1), cases, strict=True):
        _pair.by_twin(a, b, 0.0, 1e-7, want)
        exact = [0, 1, 8, 9, 10, *range(12, _pair.PACKED)]
        np.testing.assert_array_equal(got[exact], want[exact], f"{a.dtype} {b.dtype} {a.size}")
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(got[2:12], want[2:12], rtol=1e-10, atol=1e-12 * want[3] * want[4])
