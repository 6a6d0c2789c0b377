"""Puts the old import names at the end of `sys.path`: a real `ptdbg_ascend` or `precision_tool` goes before."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithOldNames(build_py):
    """Writes a path file beside the package; site-packages is what its line is relative to."""

    def run(self) -> None:
        """Copy the package, and the path file beside it."""
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "trueup_compat.pth").write_text("trueup_compat/old_names\n", encoding="utf-8")


setup(cmdclass={"build_py": WithOldNames})
