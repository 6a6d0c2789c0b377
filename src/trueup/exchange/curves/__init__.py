"""Curves that other tools wrote, as `trueup.analysis.curves.Run`: ``files`` reads tables and folders, ``lines`` the lines of a log.

`read` is all that others call. No reader needs the tool that wrote the file; TensorBoard's events need protobuf (extra ``tfdbg``).
Nothing is believed: files are bounded, lines are cut, no path that a file names is followed.
"""

from trueup.exchange.curves.files import read

__all__ = ["read"]
