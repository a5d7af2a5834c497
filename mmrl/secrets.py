"""The secrets of this process, and the one place that hides them in text.

A secret is the value of an environment variable: one whose name says that it holds a key or a password, one that a
config names as the holder of a key (`key_env`), or one that a config interpolates (`${oc.env:NAME}`) where a secret
belongs (`is_secret`). Whatever mmrl prints or writes goes through `hide`, which puts `${oc.env:NAME}` where the value
stood; `reveal` undoes that, so that a run continues from a stored config that holds no secret. Any other interpolated
value is stored as it is: a run must not change with the environment.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO, cast
from urllib.parse import quote, quote_plus

from mmrl.errors import ConfigError

SHORTEST = 6
"""Characters of the shortest value that is hidden: a shorter one is in half of all words."""
SHORTEST_TOKEN = 16
"""Letters of the shortest token: what is shorter can be guessed."""
PLAIN_NAME = 16
"""Letters and `_` alone, fewer than this: a name such as `hotpotqa`, which must stay readable, and no key."""
_NAMES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
SECRET_WORDS = ("api_key", "apikey", "secret", "password", "access_token", "auth_token")
"""A config key with one of these in it holds a secret."""
_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}")

_secrets: dict[str, str] = {}
"""Value -> the variable that holds it."""
_forms: tuple[tuple[str, str], ...] = ()
"""Text that is replaced, and what by; long ones first, since one may hold another."""


def secret_name(key: str) -> bool:
    """Check if the name of a config or address key marks its value as a secret; one with `_env` names a variable."""
    key = key.lower().replace("-", "_")
    return not key.endswith("_env") and (any(word in key for word in SECRET_WORDS) or key in ("key", "token", "sig"))


_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:sk|pk|rk)-(?:[a-z0-9]+-){0,3}(?=\w*\d)\w{12,}|hf_(?=\w*[A-Z0-9])\w{16,}|gh[oprsu]_\w{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.)"
)
_USER_IN_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]*@")
_FIELDS = re.compile(r"(?:^--?|[?&])([\w-]+)=")
"""Names in the query of an address, and the one of an option."""


def looks_like_a_key(text: str) -> bool:
    """Check if `text` contains a key as issued by a well-known service (OpenAI, Hugging Face, GitHub, AWS, ...)."""
    return _KEY.search(text) is not None


def user_in_address(text: str) -> bool:
    """Check if `text` begins with an address that has a user or a password in it."""
    return _USER_IN_ADDRESS.match(text) is not None


def is_secret(name: str, path: str, words: Sequence[str]) -> bool:
    """Check if a config that interpolates an environment variable uses it as a secret.

    It does where the variable's name or the config key's says so, in a header, in an address with a user or a secret in
    its query, and after an option such as `--api-key`; and where the value is such an address or a service's key.

    Args:
        name: of the variable.
        path: config path that it is used at.
        words: the text that it is used in, not interpolated; in a list, after the item before.
    """
    value = os.environ[name]
    keys = path.split(".")
    option = words[0].lstrip("-") if len(words) > 1 and words[0].startswith("-") else ""
    return (
        _says_secret(name)
        or any(secret_name(key) or key.lower().endswith("headers") for key in keys)
        # a key in the place of its variable's name
        or (keys[-1].endswith("_env") and value not in os.environ)
        or _says_secret(option)
        or any(_with_credentials(text) for text in (words[-1], value))
        or looks_like_a_key(value)
    )


def _says_secret(name: str) -> bool:
    return _NAMES.search(name) is not None or secret_name(name)


def _with_credentials(text: str) -> bool:
    """True for an address with a user or a secret in its query, and for an option such as `--api-key=…`."""
    return bool(_USER_IN_ADDRESS.search(text)) or any(_says_secret(field) for field in _FIELDS.findall(text))


def can_be_secret(value: str) -> bool:
    """Check if a value can be a secret: no number, truth value or short word, and no folder of this machine."""
    if (
        len(value) < SHORTEST
        or value.lower() == "false"
        or re.fullmatch(r"[+-]?[\d_.]+(e[+-]?\d+)?", value, re.IGNORECASE)
    ):
        return False
    if len(value) < PLAIN_NAME and re.fullmatch(r"[a-z_]+", value):
        return False
    # A variable with such a name may hold where a key lies, which is no secret.
    first = Path(value).parts[:2]
    return not (value.startswith("/") and len(first) == 2 and Path(*first).exists())


def add_secret(name: str, value: str, anyway: bool = False) -> None:
    """Hide `value`, which the environment variable `name` holds, from now on.

    Args:
        anyway: also where it looks like a plain word or a number.
    """
    global _forms
    value = value.strip()
    if value in _secrets or not (can_be_secret(value) or (anyway and len(value) >= SHORTEST)):
        return
    _secrets[value] = name
    forms = {form: mark for secret, variable in _secrets.items() for form, mark in _encodings(secret, variable).items()}
    _forms = tuple(sorted(forms.items(), key=lambda pair: -len(pair[0])))


def add_environment() -> None:
    """Hide the values of all environment variables whose names say that they hold a key or a password."""
    for name, value in os.environ.items():
        if _NAMES.search(name):
            add_secret(name, value)


def environment_value(name: str) -> str | None:
    """Return the value of an environment variable that holds a secret and hide it from now on; None if unset."""
    value = os.environ.get(name)
    if value is not None:
        add_secret(name, value)
    return value


def hide(text: str) -> str:
    """Replace each secret in `text` by the reference to its variable; also as JSON, HTML, an address or base64."""
    # Most texts hold none of them, and looking costs less than replacing.
    for form, reference in _forms:
        if form in text:
            text = text.replace(form, reference)
    return text


def token_of(name: str, key: str) -> str:
    """Return the token in the environment variable `name` and hide it from now on.

    Raises:
        ConfigError: it is not set, or holds no token; `key` is what the user would change.
    """
    token = os.environ.get(name, "").strip()
    if not token:
        raise ConfigError(f"{key}: the environment variable {name} is not set, expected a token in it")
    if len(token) < SHORTEST_TOKEN or not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(
            f"{key}: the environment variable {name} holds no token; expected {SHORTEST_TOKEN} or more letters, digits "
            "and signs without a space"
        )
    add_secret(name, token, anyway=True)
    return token


def holder(text: str) -> str | None:
    """Return the variable whose literal value is in `text`, or None."""
    return next((name for value, name in list(_secrets.items()) if value in text), None)


def reveal(value: object) -> object:
    """Replace references to variables, at any depth, by their values, which are hidden from now on.

    Raises:
        KeyError: a variable is not set; its name.
    """
    if isinstance(value, Mapping):
        return {key: reveal(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(reveal(item) for item in value)
    return _REFERENCE.sub(_current, value) if isinstance(value, str) and "${oc.env:" in value else value


def _current(match: re.Match[str]) -> str:
    value = environment_value(match.group(1))
    if value is None:
        raise KeyError(match.group(1))
    return value


def _encodings(value: str, name: str) -> dict[str, str]:
    """Return the encodings of a value in text (plain, JSON, HTML, address, base64), each with its replacement."""
    reference, mark = f"${{oc.env:{name}}}", f"[{name}]"
    raw = value.encode("utf-8", "surrogateescape")
    # A reader of JSON or HTML must get the reference back, which `reveal` knows.
    forms = dict.fromkeys((json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]), reference)
    forms |= {html.escape(value): reference, html.escape(value, quote=False): reference}
    coded_forms = [quote(raw, safe=""), quote(raw), quote_plus(raw)]
    coded_forms += [text.lower() for text in coded_forms if "%" in text]
    coded = base64.b64encode(raw).decode().rstrip("=")
    coded_forms += [coded, coded.replace("+", "-").replace("/", "_")]
    marks = {form: mark for form in coded_forms if len(form) >= SHORTEST} | forms
    return marks | {value: reference}


class HidingStream:
    """A text stream that hides secrets in what is written to it; all else is the stream's own.

    It stays open, since it is the process's: where a user's code closes what is below it, what is written is dropped.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    @classmethod
    def around(cls, stream: TextIO) -> TextIO:
        """Wrap `stream`, unless it is wrapped already."""
        return stream if isinstance(stream, cls) else cast(TextIO, cls(stream))

    @property
    def _open(self) -> bool:
        return not getattr(self._stream, "closed", False)  # another program's stand-in may lack it

    def write(self, text: str) -> int:
        """Write `text` without its secrets."""
        # The length before hiding is returned: callers compare it with their own text.
        if self._open:
            self._stream.write(hide(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what is below it."""
        if self._open:
            self._stream.flush()

    close = flush

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
