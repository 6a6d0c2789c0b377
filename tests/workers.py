"""The workers of a test run, forked of one process that has collected the tests: none of them imports a module anew.

    pytest -n 4                     gives each worker the executable of `warm_python` for its Python
      one process collects          imports all test modules and what they import, then forks
        a fork for each worker      runs what xdist sends it, as a new interpreter would

Where xdist has no workers this file does nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

import warm_python

SOON = ("torch._dynamo", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")
"""What tests import when they run, and takes long; that it is not there they say themselves."""


def start(config: pytest.Config) -> str:
    """Begin to collect, in a process that ends with the test run; return the executable that is to be the workers' Python."""
    folder = tempfile.TemporaryDirectory(prefix="workers-")
    path = warm_python.write(Path(folder.name))
    listening = warm_python.listen(Path(folder.name))  # from now on workers may ask: they wait until the tests are collected
    command = [sys.executable, "-m", "workers", str(listening.fileno()), *config.args]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=config.invocation_params.dir,
        pass_fds=[listening.fileno()], env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    listening.close()
    os.environ[warm_python.TESTS] = str(os.getpid())
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(process.kill)
    return str(path)


def main(descriptor: int, tests: Sequence[str], path: Sequence[str]) -> None:
    """Collect, then be a worker in each fork."""
    pytest.main(["--collect-only", "-n", "0", "-p", "no:cacheprovider", *tests])  # what cannot be collected the workers tell
    with contextlib.suppress(ImportError):
        for name in SOON:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    words, folder, environment = warm_python.serve(socket.socket(fileno=descriptor))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    sys.modules["__main__"] = types.ModuleType("__main__")  # a process that a test spawns would import the one of this file
    warm_python.execute(words[1:])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:], [*sys.path])
