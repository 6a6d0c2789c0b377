"""What a run did with dtypes and which operators it used: dangerous casts, dtypes of matrix products, two graphs side by side.

`check` is all of it. Its parts are functions of captures that return frozen facts: `dangerous_casts`, `census` and `difference`
(is mixed precision on, and where do two runs differ in it), `similarity` (calls that only one run has). Knows `store`, `model`,
and the parts of `verdict` and `anomalies` that read records and name places; knows no framework.
"""

from trueup.analysis.audit.casts import Cast, Casts, dangerous_casts
from trueup.analysis.audit.checking import CallCount, Check, Similarity, check, similarity
from trueup.analysis.audit.reading import Census, Difference, Product, census, difference

__all__ = [
    "CallCount", "Cast", "Casts", "Census", "Check", "Difference", "Product", "Similarity", "census", "check", "dangerous_casts",
    "difference", "similarity",
]  # fmt: skip
