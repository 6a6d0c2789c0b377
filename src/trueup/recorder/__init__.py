"""What every framework adapter shares: the options of a capture, its filters, ordinals, call sites, buffering and flushing.

An adapter decides *what* a call is and calls `Recorder.begin` and `Recorder.slot`; this package decides whether it is kept, what
it is named and when it reaches the disk. It knows no framework; adapters and the command line import it, `verdict` never does.
"""

from trueup.recorder.options import CaptureOptions
from trueup.recorder.recorder import Call, Recorder
from trueup.recorder.rows import Statistics

__all__ = ["Call", "CaptureOptions", "Recorder", "Statistics"]
