"""What secrets look like where no name tells: a table of patterns, each with its origin."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of text that is masked wherever it stands."""

    name: str
    pattern: re.Pattern[str]
    instead: str
    """What replaces a match."""
    origin: str
    in_code: bool = True
    """Whether it is one in source code too, outside literals."""


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
