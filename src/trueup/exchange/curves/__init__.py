"""Curves that other tools wrote, as `trueup.analysis.curves.Run`: ``files`` reads tables and folders, ``lines`` the lines of a log.
The way back: ``metrics`` is what a capture or a report tells; ``trackers`` writes it for TensorBoard, OpenMetrics, W&B, MLflow.

`read` is all that others call to read. No reader needs the tool that wrote the file; TensorBoard's events need protobuf (extra
``tfdbg``). A writer needs its tracker's library, an extra. Nothing is believed: files are bounded, lines are cut, no path that a
file names is followed.
"""

from trueup.exchange.curves.files import read

__all__ = ["read"]
