"""One list of secrets, hidden in whatever is printed or written, and found again when a run continues."""

import base64
import html
import io
import json
from urllib.parse import quote

import pytest

from mmrl import secrets
from mmrl.errors import ConfigError
from mmrl.secrets import HidingStream, add_environment, add_secret, can_be_secret, hide, reveal, token_of
from mmrl.system.files import atomic_write, dumps, plain
from tests.helpers.watch import terminates

SECRETS = ["sk-very-secret-0123456789", 'q"uo\\te/+=&<>tag', "pässwörd-ü", "日本語の鍵です!"]


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch):
    monkeypatch.setattr(secrets, "_secrets", {})
    monkeypatch.setattr(secrets, "_forms", ())


def spellings(value):
    raw = value.encode()
    yield from (value, json.dumps(value), json.dumps(value, ensure_ascii=False), html.escape(value))
    yield from (quote(value, safe=""), quote(value), quote(value, safe="").lower())
    for front, back in [(b"", b""), (b"x", b"y"), (b"Bearer ", b""), (b"me:", b"\n"), (b"ab", b"cd")]:
        yield base64.b64encode(front + raw + back).decode()
        yield base64.urlsafe_b64encode(front + raw + back).decode()


@pytest.mark.parametrize("value", SECRETS)
def test_every_spelling_is_hidden(value):
    add_secret("MY_KEY", value)
    for text in spellings(value):
        shown = hide(f"before {text} after")
        assert shown.startswith("before ") and shown.endswith(" after") and "MY_KEY" in shown, text
        # in base64 the ends of a secret share a letter with their neighbours: two bytes of it at most may be left
        assert max(map(len, shown.replace("[MY_KEY]", " ").split()), default=0) <= 12 or "${oc.env" in shown, shown
        assert value not in shown


def test_files_hold_references_and_a_config_gets_its_values_back(tmp_path, monkeypatch):
    config = {"url": "http://h/?k=" + SECRETS[1], "lists": ["a", [SECRETS[1]]], "seed": 3, "none": None}
    monkeypatch.setenv("MY_KEY", SECRETS[1])
    add_secret("MY_KEY", SECRETS[1])
    stored = plain(config)
    assert stored["url"] == "http://h/?k=${oc.env:MY_KEY}" and reveal(stored) == config
    assert json.loads(dumps({"a": SECRETS[1]}, indent=1)) == {"a": "${oc.env:MY_KEY}"}
    atomic_write(tmp_path / "x.html", html.escape(SECRETS[1]))
    assert (tmp_path / "x.html").read_text() == "${oc.env:MY_KEY}"
    atomic_write(tmp_path / "weights", SECRETS[1].encode())
    assert (tmp_path / "weights").read_bytes() == SECRETS[1].encode()  # bytes are none of our words
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(KeyError, match="MY_KEY"):
        reveal(stored)


def test_names_of_variables_say_what_is_a_secret(monkeypatch):
    names = ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "WANDB_API_KEY", "MY_CREDENTIALS")
    for name in names:
        monkeypatch.setenv(name, f"value-of-{name.lower()}-1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "not-a-secret-1")
    add_environment()
    for name in names:
        assert hide(f"value-of-{name.lower()}-1") == f"${{oc.env:{name}}}"
    assert hide("not-a-secret-1") == "not-a-secret-1"


@pytest.mark.parametrize(
    "value", ["", "1", "12345678", "1e-6", "true", "false", "null", "dev", "hotpotqa", "mhgpo_rr", "/tmp"]
)
def test_plain_words_stay_readable(value):
    assert not can_be_secret(value)
    add_secret("X", value)
    assert hide(f"a {value} b") == f"a {value} b"


def test_a_token_is_long_and_one_word(monkeypatch):
    for value in ("", "short", "with a space in the middle", "päässwörd-is-too-foreign"):
        monkeypatch.setenv("T", value)
        with pytest.raises(ConfigError, match=r"^x\.token_env: the environment variable T "):
            token_of("T", "x.token_env")
    monkeypatch.setenv("T", "1234567890123456")
    assert token_of("T", "x") == "1234567890123456" and hide("1234567890123456") == "${oc.env:T}"


def test_a_stream_hides_what_is_written_to_it():
    add_secret("MY_KEY", SECRETS[0])
    inner = io.StringIO()
    stream = HidingStream.around(inner)
    assert HidingStream.around(stream) is stream
    assert stream.write(f"a {SECRETS[0]}\n") == len(SECRETS[0]) + 3
    stream.writelines([SECRETS[0], "\n"])
    print("last", SECRETS[0], file=stream, flush=True)
    assert inner.getvalue().count("${oc.env:MY_KEY}") == 3 and SECRETS[0] not in inner.getvalue()
    assert not stream.isatty()


@pytest.mark.parametrize("closing", [lambda out: out.close(), lambda out: out.buffer.close()], ids=["it", "its bytes"])
def test_a_stream_that_a_users_code_closes_ends_nothing(closing):
    inner = io.TextIOWrapper(io.BytesIO())
    stream = HidingStream.around(inner)
    closing(stream)
    print("last", file=stream, flush=True)
    assert inner.closed or inner.buffer.getvalue() == b"last\n"


def test_hiding_reads_a_text_once():
    add_secret("MY_KEY", SECRETS[0])
    with terminates():
        hide("the quick brown fox " * 500_000)
