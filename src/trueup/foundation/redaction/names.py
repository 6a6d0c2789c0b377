"""Which names are names of secrets: ``db_password``, ``apiKey``, ``--hf-token``; but neither ``pad_token`` nor ``sort_key``."""

from __future__ import annotations

import re
from functools import lru_cache

STEMS = (
    "password", "passwd", "passphrase", "secret", "credential", "apikey", "accesskey", "privatekey", "accesstoken", "authtoken",
    "refreshtoken", "apitoken", "connectionstring", "webhook", "sshpass",
)  # fmt: skip
"""Anywhere in a name, its words joined: the words of OWASP's Logging Cheat Sheet ("Data to exclude") and of the variables that
AWS, Azure, GCP, Slack, Hugging Face and Weights & Biases document for their clients."""

LAST = frozenset({"key", "token", "auth", "authorization", "cookie", "jwt", "pat", "pwd", "dsn"})
"""As a name's last word, whatever stands before: ``ENCRYPTION_KEY``, ``HF_TOKEN``, ``SENTRY_DSN``."""

HARMLESS = {
    "token": frozenset(
        "pad eos bos unk cls sep mask special image video audio start end max min num new per total".split()
    ),
    "key": frozenset("label text image input output target sort data cache metric monitor".split()),
}
"""Words before the last with which it names no secret: the special tokens of transformers' tokenizers (``SpecialTokensMixin``),
counts of tokens, and columns of data sets (Megatron-LM's ``--json-keys``)."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@lru_cache(maxsize=1 << 12)
def is_secret(name: str) -> bool:
    """Tell whether what goes by this name is a secret; the words of a name begin with a capital or behind any other sign."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    joined = "".join(words)
    if any(stem in joined for stem in STEMS):
        return True
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    return last in LAST and before not in HARMLESS.get(last, ())


def is_compound(name: str) -> bool:
    """Tell whether a name is an option's or has several words: ``--key`` and ``API_KEY``, but not ``key``."""
    return name.startswith("-") or len(_WORD.findall(name)) > 1
