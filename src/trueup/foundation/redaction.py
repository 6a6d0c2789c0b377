"""Secrets stay out of what Trueup writes: manifests, reports of processes, values of arguments, source lines, documents.

    >>> redacted(["train.py", "--token", "abc", "--db=postgres://me:pw@host/runs", "--lr", "0.1"])
    ['train.py', '--token', '***', '--db=postgres://***@host/runs', '--lr', '0.1']
    >>> redacted({"path": "runs/a", "api_key": "abc"})
    {'path': 'runs/a', 'api_key': '***'}

`redacted` is the one function; whatever writes text of the user's passes it through there. Two tables say what secrets look like
where no name tells, each pattern with its origin, and which names are names of secrets: ``db_password``, ``apiKey``,
``--hf-token``; but neither ``pad_token`` nor ``sort_key``. `recorded` says which environment variables are recorded at all: those
of ``facts/variables.toml``, by exact name or narrow family, and no other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

MASK = "***"
PLAIN = frozenset({"", "true", "false", "none", "null", MASK})
"""Values that are no secret under any name: switches (``use_auth_token=True``), and what is masked already."""

LONG = 512
"""Characters of a text above which what it becomes is not kept. A manifest is masked at each writing, and most of it stays."""

_NAME = r"(?P<name>-{0,2}[A-Za-z_][\w.-]{0,200})"
_ASSIGNED = re.compile(rf"(?<![\w.-]){_NAME}\\*[\"']?\]?\s{{0,8}}(?:=>|:=|=(?!=\s)|:)\s{{0,8}}")
"""``name=``, ``name: ``, ``"name": ``, ``x["name"] = ``."""
_LISTED = re.compile(rf"(?<=[\"']){_NAME}\\*[\"']\s{{0,8}},\s{{0,8}}(?=\\*[\"'])")  # ``'--name', '`` and ``setdefault("NAME", "``
_OPTION = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w.-]{0,200})[ \t]+(?!--)")  # ``--name ``
_LITERAL = re.compile(
    r"""[bBrRfFuU]{0,2}(?:\\+(?P<e>["']).*?(?:\\+(?P=e)|\Z)|"(?:\\.|[^"\\])*(?:"|\Z)|'(?:\\.|[^'\\])*(?:'|\Z))""", re.DOTALL
)
_VALUE = re.compile(rf"""{_LITERAL.pattern}(?=[\s,;:)}}\]]|\Z)|(?:"(?:\\.|[^"\\])*(?:"|\Z)|'[^']*(?:'|\Z)|[^\s"'])+""", re.DOTALL)
"""A literal, or all up to the next space outside quotes: rather too much than a part of a password that holds a comma."""
_QUOTE = re.compile(r"""[bBrRfFuU]{0,2}(\\*["'])""")

_ELEMENT = re.compile(r"(?P<name>[-+]{0,2}[A-Za-z_][\w.-]{0,200})(?P<gap>[=:])(?P<value>.*)", re.DOTALL)
"""``--name=value``, one word of a command line, spaces included."""
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")

LENGTH = 500  # characters of a value that are kept: the longest that matter are lists of XLA's flags


def redacted(value: Any, name: str = "") -> Any:
    """Return text, a command line or nested data with its secrets masked; without secrets it comes back equal. In a list or tuple
    ``--token`` and its value may be two items; keys of a mapping are names; ``name`` is that of the value itself. A value of any
    other type is returned as it is."""
    if isinstance(value, str):
        if is_secret(name):
            return value if value.lower() in PLAIN else MASK
        return _in_text(value)
    if isinstance(value, Mapping):
        return {key: redacted(one, str(key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return _in_sequence(value, name)
    return value


def redacted_code(line: str) -> str:
    """Return a line of source code with its secrets masked: literals only, for ``key=key`` names a variable."""
    text = _shapes(line, code=True)
    return _behind(_LISTED, _LITERAL, _behind(_ASSIGNED, _LITERAL, text))


@lru_cache(maxsize=1 << 12)
def conceals(text: str, name: str = "") -> bool:
    """Tell whether `redacted` changes a text that goes by this name."""
    return bool(redacted(text, name) != text)


def _in_sequence(values: list[Any] | tuple[Any, ...], name: str) -> list[Any]:
    """Mask items one by one, and what follows an option that wants a secret: all up to the next option, if its name is a plural."""
    found: list[Any] = []
    wanted = ""
    for value in values:
        if not isinstance(value, str):
            found.append(redacted(value, name))
            wanted = ""
        elif wanted and not value.startswith("--"):
            found.append(MASK)
            wanted = wanted if wanted.endswith("s") else ""
        else:
            found.append(redacted(value, name) if name else _element(value))
            wanted = value if _FLAG.fullmatch(value) and is_secret(value) else ""
    return found


def _element(word: str) -> str:
    """Mask one word of a command line: of ``--name=value`` all that follows, spaces included."""
    match = _ELEMENT.fullmatch(word)
    if match is None or not is_secret(match["name"]) or match["value"].lower() in PLAIN:
        return _in_text(word)
    return f"{match['name']}{match['gap']}{MASK}"


def _in_text(text: str) -> str:
    return _masked.__wrapped__(text) if len(text) > LONG else _masked(text)


@lru_cache(maxsize=1 << 12)
def _masked(text: str) -> str:
    text = _shapes(text, code=False)
    for head in (_ASSIGNED, _LISTED, _OPTION):
        text = _behind(head, _VALUE, text)
    return text


def _shapes(text: str, *, code: bool) -> str:
    for shape in SHAPES:
        if shape.in_code or not code:
            text = shape.pattern.sub(shape.instead, text)
    return text


def _behind(head: re.Pattern[str], value: re.Pattern[str], text: str) -> str:
    """Mask the value behind each head whose name is a secret's; ``("query", "key", "value")`` is no list of names and values."""
    found: list[str] = []
    end = 0
    for match in head.finditer(text):
        if match.start() < end or not is_secret(match["name"]) or (head is _LISTED and not is_compound(match["name"])):
            continue
        told = value.match(text, match.end())
        if told is None or told[0].strip("\\\"'").lower() in PLAIN:
            continue
        quote = _QUOTE.match(told[0])
        around = quote[1] if quote else ""
        found += [text[end : match.end()], around, MASK, around]
        end = told.end()
    return "".join([*found, text[end:]])


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of text that is masked wherever it stands."""

    name: str
    pattern: re.Pattern[str]
    instead: str  # what replaces a match
    origin: str
    in_code: bool = True  # whether it is one in source code too, outside literals


def _shape(name: str, pattern: str, origin: str, instead: str = "***", *, in_code: bool = True) -> Shape:
    return Shape(name, re.compile(pattern, re.DOTALL), instead, origin, in_code)


SHAPES = (
    _shape("private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", "RFC 7468, section 10"),
    _shape(
        "user and password of a URL", r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)(?:[^\s/?#@:]{0,256}:\S{0,1024}@|[^\s/?#@]{1,1024}@)",
        "RFC 3986, section 3.2.1 (userinfo); the first form: a password with a slash that was not encoded", r"\1***@",
    ),
    _shape(
        "user and password of a host", r"(?<![\w:/.-])([\w.+-]{1,256}):(?![:*])[^\s:@/]{1,4096}@(?=[\w.-])",
        "user:password@host, as curl and drivers of databases take it; in code a product of matrices", r"\1:***@", in_code=False,
    ),
    _shape(
        "signed URL", r"(?i)([?&;](?:sig|x-(?:amz|goog)-(?:signature|credential|security-token))=)[^&\s\"']+",
        "AWS Signature V4, Google Cloud V4 signing, Azure shared access signatures: query parameters", r"\1***",
    ),
    _shape(
        "authorization header", r"(?i)\b(authorization\\*[\"']?\s{0,4}[:=]\s{0,4}\\*[\"']?(?:[a-z]{1,16}[ \t]+)?)[^\s\"'\\]+",
        "RFC 9110, section 11.6.2", r"\1***",
    ),
    _shape("bearer token", r"(?i)\b(bearer[ \t]+)[\w.~+/=-]{8,}", "RFC 6750, section 2.1", r"\1***"),
    _shape("JSON Web Token", r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?", "RFC 7519, section 3.1"),
    _shape("GitHub", r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})", "docs.github.com: GitHub's token formats"),
    _shape("GitLab", r"\bgl[a-z]{2,6}-[\w.-]{20,}", "docs.gitlab.com: Token overview, token prefixes"),
    _shape("Hugging Face", r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}", "huggingface.co/docs: User access tokens"),
    _shape("OpenAI, Anthropic, Stripe", r"\b[sr]k[-_][\w-]{20,}", "GitHub secret scanning: supported patterns"),
    _shape("AWS", r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b", "AWS IAM user guide: unique identifiers"),
    _shape("Google", r"\b(?:AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,})", "GitHub secret scanning: supported patterns"),
    _shape("Slack", r"\b(?:xox[a-z]-[\w-]{10,}|(?<=hooks\.slack\.com/)\S+)", "api.slack.com: Token types, incoming webhooks"),
    _shape("PyPI, npm", r"\b(?:pypi-[\w-]{16,}|npm_\w{36})", "GitHub secret scanning: supported patterns"),
)  # fmt: skip


STEMS = (
    "password", "passwd", "passphrase", "secret", "credential", "apikey", "accesskey", "privatekey", "accesstoken", "authtoken",
    "refreshtoken", "apitoken", "connectionstring", "webhook", "sshpass",
)  # fmt: skip
"""Anywhere in a name, its words joined: the words of OWASP's Logging Cheat Sheet ("Data to exclude") and of the variables that
AWS, Azure, GCP, Slack, Hugging Face and Weights & Biases document for their clients."""

LAST = frozenset({"key", "token", "auth", "authorization", "cookie", "jwt", "pat", "pwd", "dsn"})
"""As a name's last word, whatever stands before: ``ENCRYPTION_KEY``, ``HF_TOKEN``, ``SENTRY_DSN``."""

HARMLESS = {
    "token": frozenset("pad eos bos unk cls sep mask special image video audio start end max min num new per total".split()),
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


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that choose what a run computes, sorted by name, their values without secrets."""
    chosen = sorted(name for name in environment if is_recorded(name))
    return {name: redacted(environment[name])[:LENGTH] for name in chosen}


def is_recorded(name: str) -> bool:
    """Tell whether a variable is recorded; names differ by case, as for the libraries that read them."""
    names, families, left_out = _table()
    if name in names:
        return True
    return name.startswith(families) and name not in left_out and not is_secret(name)


@cache
def _table() -> tuple[frozenset[str], tuple[str, ...], frozenset[str]]:
    """Return exact names, families and what is left out of these."""
    from trueup.foundation import toml  # here: whatever writes text imports this file, and few ask for variables

    rows: list[dict[str, Any]] = toml.packaged("trueup.foundation.facts", "variables.toml")["rows"]
    kinds = ("names", "families", "except")
    names, families, left_out = ([name for row in rows for name in row.get(kind, "").split()] for kind in kinds)
    return frozenset(names), tuple(families), frozenset(left_out)
