"""The compiled kernel: optional, so that a machine without a C compiler still gets a working wheel."""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# The stable ABI makes one wheel serve Python 3.10 and later; free-threaded builds do not have it yet (3.14).
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

SOURCES = Path("src/trueup/kernels/native")

NATIVE = Extension(
    "trueup.kernels._native",
    sources=sorted(str(path) for path in SOURCES.glob("*.c")),
    depends=sorted(str(path) for path in SOURCES.glob("*.h")),
    libraries=["dl"] if sys.platform == "linux" else [],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
    extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-g0", "-fno-math-errno", "-Wno-psabi"],
    py_limited_api=STABLE,
    optional=True,
)

setup(ext_modules=[NATIVE], options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {})
