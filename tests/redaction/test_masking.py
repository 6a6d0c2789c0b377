"""No form in which a secret is given comes through, and what is no secret is left as it is."""

from __future__ import annotations

import json
import shlex
import string
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trueup.foundation.redaction import MASK, SHAPES, conceals, is_secret, redacted, redacted_code

NAMES = """
password PASSWORD db_password TF_VAR_db_password dbPassword PGPASSWORD MYSQL_PWD passwd db.password SSHPASS token HF_TOKEN hf-token
accessToken authtoken HUGGING_FACE_HUB_TOKEN AWS_SESSION_TOKEN key api_key apiKey APIKEY WANDB_API_KEY model.api_key
AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY client_secret secrets
credentials SENTRY_DSN AZURE_STORAGE_CONNECTION_STRING SLACK_WEBHOOK_URL cookie auth
""".split()
HARMLESS = """
pad_token eos-token bos_token mask_token max_tokens num-tokens tokens tokenizer token_dim key_dim sort_key label-key keys monkey
keyboard num_key_value_heads lr model path passes compass author authors steps
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert redacted({name: "abc"}) == {name: MASK}


@pytest.mark.parametrize("name", HARMLESS)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)
    for told in ({name: "abc"}, [f"--{name}", "abc"], [f"--{name}=abc"], f"{name}=abc"):
        assert redacted(told) == told


GIVEN = {
    "--token X": (["train.py", "--token", "hunter2", "--lr", "1"], ["train.py", "--token", MASK, "--lr", "1"]),
    "--token=X": (["--token=hunter2 and more"], [f"--token={MASK}"]),
    "key=X": (["key=hunter2"], [f"key={MASK}"]),
    "hydra": (["++db.password=hunter2", "+lr=1"], [f"++db.password={MASK}", "+lr=1"]),
    "several": (["--api-keys", "hunter2", "hunter2", "--lr"], ["--api-keys", MASK, MASK, "--lr"]),
    "env": (["env", "WANDB_API_KEY=hunter2", "python"], ["env", f"WANDB_API_KEY={MASK}", "python"]),
    "shell": (["bash", "-c", "python x.py --token hunter2 --lr 1"], ["bash", "-c", f"python x.py --token {MASK} --lr 1"]),
    "switch": (["--use-auth-token", "--lr", "1"], ["--use-auth-token", "--lr", "1"]),
    "URL": ("postgres://me:hunter2@host:5432/runs", f"postgres://{MASK}@host:5432/runs"),
    "URL, not encoded": ("redis://:hunter2/x@y@host/0", f"redis://{MASK}@host/0"),
    "URL, a token alone": ("git+https://hunter2@host/repo", f"git+https://{MASK}@host/repo"),
    "host": ("root:hunter2@localhost", f"root:{MASK}@localhost"),
    "signed": ("https://h/x?X-Amz-Signature=hunter2&a=1", f"https://h/x?X-Amz-Signature={MASK}&a=1"),
    "JSON": ('{"db": {"password": "hunter2 \\" hunter2"}}', f'{{"db": {{"password": "{MASK}"}}}}'),
    "JSON in JSON": ('{\\"token\\": \\"hunter2 hunter2\\"}', f'{{\\"token\\": \\"{MASK}\\"}}'),
    "YAML": ("user: me\npassword: hunter2\nlr: 1", f"user: me\npassword: {MASK}\nlr: 1"),
    "header": ("Authorization: Basic hunter2==", f"Authorization: {MASK} {MASK}"),
    "bearer": ("got 401 for Bearer hunter2.hunter2", f"got 401 for Bearer {MASK}"),
    "a failed command": ("Command '['x', '--token', 'hunter2']' failed", f"Command '['x', '--token', '{MASK}']' failed"),
    "quoted by a shell": ("PASSWORD='hunter2 hunter2' python", f"PASSWORD='{MASK}' python"),
    "nested": ({"a": [{"api_key": "hunter2"}], "n": 1}, {"a": [{"api_key": MASK}], "n": 1}),
}  # fmt: skip


@pytest.mark.parametrize("form", GIVEN)
def test_forms(form: str) -> None:
    told, expected = GIVEN[form]
    assert redacted(told) == expected
    assert redacted(expected) == expected


LOOKS = {
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
    "user and password of a URL": "s3://me:hunter2@host/x", "user and password of a host": "me:hunter2@host",
    "signed URL": "https://h/x?sig=hunter2", "authorization header": "authorization: hunter2",
    "bearer token": "bearer hunter2hunter2", "JSON Web Token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.hunter2",
    "GitHub": f"ghp_{'a1' * 18}", "GitLab": f"glpat-{'a1' * 10}", "Hugging Face": f"hf_{'aB' * 17}",
    "OpenAI, Anthropic, Stripe": f"sk-proj-{'a1' * 12}", "AWS": "AKIAIOSFODNN7EXAMPLE", "Google": f"AIza{'a1' * 17}b",
    "Slack": f"xoxb-{'12' * 8}", "PyPI, npm": f"npm_{'a1' * 18}",
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_each_shape_is_known_by_its_look(shape: Any) -> None:
    text = LOOKS[shape.name]
    assert shape.origin
    assert shape.pattern.search(text)
    found = redacted(f"it said {text} and went on")
    assert MASK in found
    assert "hunter2" not in found
    assert found.startswith("it said ")
    assert found.endswith(" and went on")


LEFT = [
    "cuda:0", "ij,jk->ik", "12:30:01 step 3", "torch::nn@x", "git@github.com:org/repo", "a == token", "token == 3", "tcp://10.0.0.1:29500",
    "file:///tmp/x", "use_auth_token=True", "lambda x: x @ w", "rank 0: the capture ended with KeyError: 'x'", "key", "--token", "",
    "2.13.0+cpu", "f32[8,128]{1,0}", "encoder.layers.0.self_attn.key", "SAME", "épée à 3 €", "/a/b.py:3 in forward", "https://h/x?a=1&b=2",
]  # fmt: skip


@pytest.mark.parametrize("text", LEFT)
def test_what_is_no_secret_is_left_alone(text: str) -> None:
    assert redacted(text) == text
    assert redacted([text]) == [text]
    assert not conceals(text)


CODE = {
    'login(token="hunter2")': f'login(token="{MASK}")',
    "os.environ['API_KEY'] = 'hunter2'": f"os.environ['API_KEY'] = '{MASK}'",
    'os.environ.setdefault("HF_TOKEN", "hunter2")': f'os.environ.setdefault("HF_TOKEN", "{MASK}")',
    'x = load("s3://me:hunter2@host/x")': f'x = load("s3://{MASK}@host/x")',
    "y = attention(query=q, key=k, value=v)": None, 'for n in ("query", "key", "value"):': None, "f = lambda x:x@w.T": None,
    "key: str = make('abc')": None, "token = self.token + 1": None, "assert key == 'abc'": None,
}  # fmt: skip


@pytest.mark.parametrize("line", CODE)
def test_in_source_code_only_literals_are_secrets(line: str) -> None:
    assert redacted_code(line) == (CODE[line] or line)


def test_what_is_no_text_is_left_alone() -> None:
    told = {"a": (1, 2.5, None, True), "b": {"key": {"tensor": "input.key"}}, "password": None}
    assert redacted(told) == {"a": [1, 2.5, None, True], "b": {"key": {"tensor": "input.key"}}, "password": None}


secrets = st.text(string.ascii_letters + string.digits + "!#$%^*+,./:;<>?[]_{|}~()&=", min_size=8, max_size=40)
names = st.sampled_from(NAMES)


def leaks(found: Any, secret: str) -> bool:
    """Tell whether any six characters of the secret came through, apart from those of the mask and of names."""
    text = found if isinstance(found, str) else " ".join(map(str, found))
    return any(secret[k : k + 6] in text for k in range(len(secret) - 5))


@given(name=names, secret=secrets)
def test_no_secret_comes_through(name: str, secret: str) -> None:
    assume(not leaks(f"python x.py {name} run with {name.replace('-', '_')} then and more login", secret))
    assert not leaks([redacted({name: secret})[name]], secret)
    assert not leaks(redacted(["x.py", f"--{name}", secret, "--lr"])[2], secret)
    assert not leaks(redacted([f"--{name}={secret}", f"{name}={secret} and more"]), secret)
    assert not leaks(redacted(f"run with {name}={secret} then"), secret)
    assert not leaks(redacted(f"python x.py --{name} {shlex.quote(secret)}"), secret)
    assert not leaks(redacted(json.dumps({"a": 1, name: secret, "z": 2})), secret)
    assert not leaks(redacted(f"{name}: {secret}"), secret)
    assert not leaks(redacted(str(["x", f"--{name}", secret])), secret)
    assert not leaks(redacted_code(f"login({name.replace('-', '_').replace('.', '_')}={secret!r})"), secret)


@given(secret=st.text(string.ascii_letters + string.digits + "!$*+,.;=_~:@/?#", min_size=8, max_size=40))
def test_no_password_of_a_url_comes_through(secret: str) -> None:
    assume(not leaks("see postgres://me:@host:5432/db now", secret))
    assert not leaks(redacted(f"see postgres://me:{secret}@host:5432/db now"), secret)


texts = st.text(st.sampled_from(string.printable), max_size=80)


@given(st.one_of(texts, st.lists(texts, max_size=5), st.dictionaries(st.one_of(names, texts), texts, max_size=4)))
def test_masking_twice_is_masking_once(told: Any) -> None:
    once = redacted(told)
    assert redacted(once) == once


def test_long_text_is_no_trap() -> None:
    """Each pattern looks a bounded way ahead: were one quadratic, this would take hours."""
    for piece in ("a:", "://a", "--a ", "'a', ", "\\\"", "-----BEGIN PRIVATE KEY-----", "token=", "eyJaaaaaaaa.", "bearer "):
        redacted(piece * (50_000 // len(piece)))
