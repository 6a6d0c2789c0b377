"""The compiled kernel: optional, so that a machine without a C compiler still gets a working wheel."""

import sys
import sysconfig

from setuptools import Extension, setup

# The stable ABI makes one wheel serve Python 3.10 and later; free-threaded builds do not have it yet (3.14).
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

NATIVE = Extension(
    "trueup.kernels._native",
    sources=["src/trueup/kernels/_native.c"],
    depends=["src/trueup/kernels/_native_group.h"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
    extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-g0", "-fno-math-errno", "-Wno-psabi"],
    py_limited_api=STABLE,
    optional=True,
)

setup(ext_modules=[NATIVE], options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {})
