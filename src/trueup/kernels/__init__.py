"""One-pass statistics, sketch and digest of a tensor, and the distance of two sketches.

Plain NumPy arrays in, plain numbers out: no framework is imported here. Recorders call ``summarize`` and ``digest``, or
both at once by address (``native().measure``);
comparisons call ``distance``; a device kernel takes its constants from ``trueup.kernels.sketch``.
"""

from trueup.kernels._compiled import KINDS, native
from trueup.kernels._copy import copy
from trueup.kernels._digest import digest, hexadecimal
from trueup.kernels._summary import MASKING, summarize
from trueup.kernels.sketch import distance, relative_distance

__all__ = ["KINDS", "MASKING", "copy", "digest", "distance", "hexadecimal", "native", "relative_distance", "summarize"]
