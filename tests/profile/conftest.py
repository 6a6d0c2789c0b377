"""The entry point as it is installed, for processes that ask for a profile."""

from port.conftest import autoloaded

__all__ = ["autoloaded"]
