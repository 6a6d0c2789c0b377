"""Secrets stay out of what Trueup writes: manifests, reports of processes, values of arguments, source lines, documents.

    >>> redacted(["train.py", "--token", "abc", "--db=postgres://me:pw@host/runs", "--lr", "0.1"])
    ['train.py', '--token', '***', '--db=postgres://***@host/runs', '--lr', '0.1']
    >>> redacted({"path": "runs/a", "api_key": "abc"})
    {'path': 'runs/a', 'api_key': '***'}

`redacted` is the one function; whatever writes text of the user's passes it through there. ``masking`` also tells which names are
those of secrets and what secrets look like without a name, ``variables`` which environment variables are recorded at all. Standard
library only; knows nothing of Trueup, so that every room may import it.
"""

from trueup.foundation.redaction.masking import MASK, conceals, redacted, redacted_code

__all__ = ["MASK", "conceals", "redacted", "redacted_code"]
