"""The compiled parts: optional, so that a machine without a C compiler still gets a working wheel."""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# The stable ABI makes one wheel serve Python 3.10 and later; free-threaded builds do not have it yet (3.14).
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

HEADERS = sorted(str(path) for path in Path("src/trueup").rglob("native/*.h"))


def extension(name: str, folder: str, *, libraries: list[str], flags: list[str]) -> Extension:
    """Describe the extension module made of all C files of a folder."""
    return Extension(
        name,
        sources=sorted(str(path) for path in Path("src/trueup", folder).glob("*.c")),
        depends=HEADERS,
        libraries=libraries,
        define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
        extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-g0", *flags],
        py_limited_api=STABLE,
        optional=True,
    )


EXTENSIONS = [
    extension(
        "trueup.foundation.kernels._native", "foundation/kernels/native",
        libraries=["dl"] if sys.platform == "linux" else [], flags=["-fno-math-errno", "-Wno-psabi"],
    ),
    extension("trueup.recording.adapters.torch._quick", "recording/adapters/torch/native", libraries=[], flags=[]),
]  # fmt: skip

setup(ext_modules=EXTENSIONS, options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {})
