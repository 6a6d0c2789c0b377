"""Found first on PYTHONPATH by every Python of `trueup capture -- COMMAND`, or `trueup simdev run -- COMMAND`; runs the one it
hides, then arms."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - runs at every start-up: no pathlib


def _run_hidden() -> None:
    """Run the user's or the distribution's own sitecustomize, if there is one further down the path."""
    path = [p for p in sys.path if os.path.abspath(p or ".") != _here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _arm() -> None:
    try:
        from trueup.recording.arming import install

        install()
        if os.environ.get("TRUEUP_SIMULATED"):
            from trueup.autoload import stand_in_elsewhere

            stand_in_elsewhere()
    except Exception as error:  # noqa: BLE001 - a Python that is not Trueup's runs on
        said = f"trueup: {sys.executable} cannot import trueup, so this process is not captured: {error}"
        print(said, file=sys.stderr)


try:
    _run_hidden()
finally:  # what goes wrong in it is reported by ``site``, as it would be without us
    _arm()
