"""A distinctive secret wherever a user might put one, and in every reply: no byte of it is kept or shown."""

import base64
import gzip
import html
import itertools
import json
from urllib.parse import quote

import pytest

from mmrl import secrets
from mmrl.cli import main
from mmrl.store.rundir import RunDir
from tests.helpers.servers import Scripted, chat_reply, serving

KEY = "sk-Distinctive-0123456789-kEy"
GATE = "gate/Pass+word=9876&distinct"
ECHOES = itertools.count()
SPELLINGS = {
    "plain": lambda value: value,
    "percent": lambda value: quote(value, safe=""),
    "html": html.escape,
    "base64": lambda value: base64.b64encode(value.encode()).decode(),
}


@pytest.fixture(autouse=True)
def planted(monkeypatch, tmp_path):
    monkeypatch.setattr(secrets, "_secrets", {})
    monkeypatch.setattr(secrets, "_forms", ())
    monkeypatch.setenv("MINE", KEY)  # names that say nothing: only a config's use of them does
    monkeypatch.setenv("GATE", GATE)
    monkeypatch.chdir(tmp_path)


def kept_by(text):
    """Which spelling of a secret stands in `text`, or nothing."""
    for value in (KEY, GATE):
        for name, spell in SPELLINGS.items():
            spelt = spell(value)
            if spelt in text:
                return f"{name}: {spelt}"
    return ""


def bytes_below(folder):
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            yield path, (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")


@pytest.fixture
def named(monkeypatch):
    """The secrets in variables whose names say that they are secrets."""
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setenv("GATE_PASSWORD", GATE)


PLACES = {
    "a value": ["train.lr=${oc.env:MY_KEY}"],
    "within a text": ["train.lr=before-${oc.env:MY_KEY}-after"],
    "a key of another section": ["++task.${oc.env:MY_KEY}=1", "algo.x=${oc.env:MY_KEY}"],
    "a mapping": ["task.data={train: '${oc.env:MY_KEY}', nope: '${oc.env:GATE_PASSWORD}'}"],
    "a list": ["task.modules=['${oc.env:MY_KEY}']"],
    "a choice": ["+model@x=${oc.env:MY_KEY}"],
    "an address": ["task=search_agent", "task.judge.url=${oc.env:GATE_PASSWORD}", "task.judge.model=x"],
    "a name": ["run.name=${oc.env:MY_KEY}", "run.dir=", "engine.endpoints={x: {url: '${oc.env:GATE_PASSWORD}'}}"],
    "a default": ["train.lr=${oc.env:NOT_SET,${oc.env:MY_KEY}}"],
    "a file": ["task=mine"],
    "a sweep": ["-m", "seed=1,2", "train.lr=${oc.env:MY_KEY},${oc.env:GATE_PASSWORD}"],
}
USES = {
    "a user in an address": ["task=search_agent", "task.judge.url=http://me:${oc.env:MINE}@h/v1", "task.judge.model=x"],
    "an address with a user": ["task=search_agent", "task.judge.url=${oc.env:WITH_USER}", "task.judge.model=x"],
    "the query of an address": ["task.retriever.name=remote", "task.retriever.url='http://[x?key=${oc.env:GATE}'"],
    "arguments of vLLM": ["engine=vllm_server", "engine.args=[--api-key,'${oc.env:MINE}']", "engine.nope=1"],
    "an argument of vLLM": ["engine=vllm_server", "engine.args='--hf-token=${oc.env:MINE}'", "engine.nope=1"],
    "a key of a secret": ["++task.api_key=${oc.env:MINE}"],
    "a header": [
        "engine=openai",
        "engine.endpoint.extra_headers={Host: '${oc.env:MINE}'}",
        "train.lr=x-${oc.env:MINE}",
    ],
    "the name of a variable": ["engine.endpoints={reranker: {model: x, key_env: '${oc.env:MINE}'}}", "seed=x"],
}


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("place", PLACES)
def test_no_error_repeats_a_secret(place, tmp_path, capsys):
    folder = tmp_path / "conf" / "task"
    folder.mkdir(parents=True)
    text = "name: hotpotqa\nmax_tokens: ${oc.env:MY_KEY}\nreward: '${oc.env:GATE_PASSWORD}'\n"
    (folder / "mine.yaml").write_text(text)
    assert main(["train", *PLACES[place]]) == 2
    shown = capsys.readouterr()
    assert "error: " in shown.err and not kept_by(shown.err + shown.out), shown.err


@pytest.mark.parametrize("use", USES)
def test_what_a_config_uses_as_a_secret_is_one_whatever_its_variable_is_called(use, monkeypatch, capsys):
    monkeypatch.setenv("WITH_USER", f"http://me:{KEY}@h/v1")
    assert main(["train", *USES[use]]) == 2
    assert {"MINE", "GATE", "WITH_USER"} & {*secrets._secrets.values()}
    shown = capsys.readouterr()
    assert "error: " in shown.err and not kept_by(shown.err + shown.out), shown.err


@pytest.mark.usefixtures("named")
def test_a_printed_config_has_no_secret(capfd):
    words = ["task.data.train=${oc.env:MY_KEY}", "run.name='x ${oc.env:GATE_PASSWORD} y'"]
    assert main(["train", *words, "--cfg", "job"]) == 0
    shown = capfd.readouterr().out
    assert "${oc.env:MY_KEY}" in shown and "${oc.env:GATE_PASSWORD}" in shown and not kept_by(shown)


def test_any_other_value_from_the_environment_is_stored_and_stays(monkeypatch, tmp_path, errors_of):
    """A reference would make another run of a stored one: with the base, the data or the teacher of today."""
    seen = []
    monkeypatch.setattr("mmrl.run.session.session", lambda config, run, checkpoint, processes: seen.append(config) or 0)
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "mine.yaml").write_text("{}")
    for name, value in {"RUN": "one-of-mine", "MINE": "prompts/mine.yaml", "WHERE": "http://127.0.0.1:9/v1"}.items():
        monkeypatch.setenv(name, value)
    words = ["run.dir=run", "hardware=cpu", "run.name='n ${oc.env:RUN}'", "task.prompts=${oc.env:MINE}"]
    assert main(["train", *words]) == 0
    stored = RunDir.read("run").config
    assert (stored["run"]["name"], stored["task"]["prompts"]) == ("n one-of-mine", "prompts/mine.yaml")
    said = errors_of("eval", "policy=x", "engine=openai", "engine.endpoint.url=${oc.env:WHERE}")
    assert "http://127.0.0.1:9/v1" in said and "oc.env" not in said
    monkeypatch.setenv("RUN", "of-another-shell")
    monkeypatch.delenv("MINE")
    assert main(["train", "resume=run"]) == 0
    assert seen[0].config.model_dump() == seen[1].config.model_dump()


def test_a_key_that_a_shell_has_put_in_is_refused(monkeypatch, errors_of):
    monkeypatch.setenv("MY_API_KEY", KEY)
    said = errors_of("train", f"run.name=x-{KEY}")
    assert said.startswith("error: run.name: holds the value of the environment variable MY_API_KEY")
    assert KEY not in said


PASTED = [
    ("sk-Abcdefghijk1mnop", "plugins=[{}]"),
    ("sk-proj-Abcdefghijk1mnop", "model.path={}"),
    ("hf_AbcdefghijkLmnop", "model.path=https://me:{}@host/model"),
    ("ghp_abcdefghijklmnopqrstuvwx", "run.name=x-{}"),
]


@pytest.mark.parametrize(("key", "word"), PASTED)
def test_the_key_of_a_service_is_refused_wherever_it_is_typed(key, word, errors_of):
    said = errors_of("train", word.format(key))
    assert said.startswith(f"error: {word.partition('=')[0]}: holds what looks like the key of a service")
    assert key not in said


def test_a_secret_that_looks_like_none_is_not_repeated(errors_of):
    """Neither as the name of a package nor in an address; and the advice names a key that there is."""
    words = {
        "plugins=[my-own-secret]": "plugins: got 1 that is none, expected names of packages",
        "model.path=https://me:my-own-secret@host/m": "model.path: got an address with a user or password",
        "model.path=https://my-own-secret@host/m": "model.path: got an address with a user or password",
        "engine.api_key=my-own-secret": "engine.api_key=${oc.env:NAME}, or of an endpoint key_env=NAME",
        "engine.endpoints={x: {model: m, api_key: my-own-secret}}": "engine.endpoints.x.api_key=${oc.env:NAME}, or of",
        "api_key=my-own-secret": "api_key=${oc.env:NAME}, or of an endpoint key_env=NAME",
    }
    for word, expected in words.items():
        (line,) = errors_of("train", word).splitlines()
        assert expected in line and "my-own-secret" not in line, line
    said = errors_of("train", "run.name=sk-learn-baseline", "model=hf", "model.path=me@home", "train.lr=x")
    assert said == "error: train.lr: got 'x', expected number\n"


@pytest.mark.usefixtures("named")
def test_the_directory_of_a_training_run_has_references_and_a_resume_has_the_values(monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr("mmrl.run.session.session", lambda config, run, checkpoint, processes: seen.append(config) or 0)
    words = ["run.dir=run", "run.name='n ${oc.env:MY_KEY}'", "hardware=cpu", "task.prompts='${oc.env:PROMPTS}'"]
    (tmp_path / "prompts-of-mine.yaml").write_text("{}")
    monkeypatch.setenv("PROMPTS", str(tmp_path / "prompts-of-mine.yaml"))  # a folder of this machine is no secret
    assert main(["train", *words]) == 0
    assert main(["train", "resume=run"]) == 0
    assert [settled.config.run.name for settled in seen] == [f"n {KEY}"] * 2
    config = RunDir.read("run").config
    assert config["run"]["name"] == "n ${oc.env:MY_KEY}" and config["task"]["prompts"].endswith("prompts-of-mine.yaml")
    monkeypatch.delenv("MY_KEY")
    assert main(["train", "resume=run"]) == 2
    shown = capsys.readouterr()
    assert "run: the environment variable MY_KEY is not set, which this run was given" in shown.err
    found = [path for path, text in bytes_below(tmp_path / "run") if kept_by(text)]
    assert not found and not kept_by(shown.out + shown.err)


def echoes(seen):
    """Replies of an endpoint that gives away what it was sent, each in another way; every third one is an answer."""
    number = next(ECHOES)
    names = list(SPELLINGS)
    told = " and ".join(SPELLINGS[names[number % len(names)]](value) for value in (KEY, GATE))
    kind = number % 6
    if kind == 0:
        return Scripted(f"refused: {told}", 400)
    if kind == 1:
        return Scripted(f'{{"error": "Schl\u00fcssel {told}"}}'.encode("latin-1", "replace"), 400)
    if kind == 2:
        return Scripted(f'{{"choices": [{{"message": {{"content": "{told.replace(chr(34), "")}"}}}}]}}'.encode())
    if kind == 3:
        return Scripted(
            f"{told} \u00e9".encode("latin-1", "replace"), 200, {"Content-Type": "text/plain; charset=latin-1"}
        )
    if kind == 4:
        return Scripted(json.dumps({"error": told}).encode("utf-16"), 403)
    return chat_reply(f"an answer with {told}", finish=told)


def test_what_an_endpoint_gives_away_is_nowhere(tmp_path, capsys, caplog, monkeypatch):
    # The first request asks whether the endpoint answers: it is answered.
    monkeypatch.setitem(globals(), "ECHOES", itertools.count(5))
    monkeypatch.setenv("GATE_PASSWORD", GATE)
    with serving(echoes) as (url, server):
        words = ["eval", "engine=openai", "policy=big", "task=qa_direct", "split=dev", "task.data.dev_items=40"]
        words += [
            f"engine.endpoint.url={url}/${{oc.env:GATE_PASSWORD}}",
            "engine.endpoint.key_env=MINE",
            "run.dir=eval",
        ]
        code = main([*words, "engine.endpoint.attempts=1", "eval.items=40"])
        assert server.seen and server.seen[0].headers["Authorization"] == f"Bearer {KEY}"
        again = main(["eval", "resume=eval"])
        assert "gate/Pass" in server.seen[-1].path  # the address came back
    # Most requests failed; the second start asks whether the endpoint answers, which it may refuse.
    assert code == 1 and again in (0, 1, 2)
    shown = capsys.readouterr()
    assert len(server.seen) > 20  # how many are in flight when too many have failed is a matter of time
    for path, text in bytes_below(tmp_path):
        assert not kept_by(text), path
    assert not kept_by(shown.out + shown.err)
    assert not kept_by("".join(secrets.hide(record.getMessage()) for record in caplog.records))
    assert RunDir.read("eval").config["engine"]["endpoint"]["url"].endswith("${oc.env:GATE_PASSWORD}")
    assert main(["report", "eval"]) in (0, 2) and main(["show", "eval"]) in (0, 2)
    shown = capsys.readouterr()
    assert not kept_by(shown.out + shown.err)
