"""Nobody is let in: who may ask mmrl's servers, whose code runs, and that no name leads out of the user's folders."""

import ast
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from mmrl.cli import main
from mmrl.config import ModelConfig
from mmrl.config.base import address_problem, is_loopback
from mmrl.config.engines import VllmServerConfig
from mmrl.engines.base import EngineSetup
from mmrl.engines.vllm.command import engine_arguments, vllm_problems
from mmrl.errors import ConfigError
from mmrl.models.load import load_configs
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.retrieval.protocols import LARGEST_REQUEST
from mmrl.retrieval.remote import RemoteRetriever
from mmrl.retrieval.serving import make_app
from mmrl.sets.queue import run_state
from mmrl.store.rundir import RunDir
from tests.helpers import TOP
from tests.helpers.servers import DOCUMENTS, listening

TOKEN = "a-token-of-some-length"
SOURCES = sorted([*(TOP / "mmrl").rglob("*.py"), *(TOP / "scripts").rglob("*.py")])


def app(token=None):
    return make_app(Bm25Retriever(DOCUMENTS), {"documents": 3}, token=token)


# -- who may ask the retriever server ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (None, 401),
        ("", 401),
        ("Bearer ", 401),
        (TOKEN, 401),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        (f"bearer {TOKEN}", 401),
        (b"Bearer \xff\xfe", 401),
    ],
)
def test_a_server_with_a_token_answers_nothing_without_it(header, status):
    client = TestClient(app(TOKEN))
    headers = {} if header is None else {"Authorization": header}
    for method, path in [("GET", "/health"), ("POST", "/retrieve")]:
        body: dict[str, Any] = {"json": {"queries": ["river"]}} if method == "POST" else {}
        reply = client.request(method, path, headers=headers, **body)
        assert reply.status_code == status, (method, path)
        if status == 401:
            assert "Lisbon" not in reply.text and reply.headers["www-authenticate"] == "Bearer"


def test_the_client_sends_its_token_and_is_refused_without():
    with listening(app(TOKEN)) as url:
        let_in = RemoteRetriever(url, retries=0, token=TOKEN)
        assert let_in.search(["river Douro"], [1])[0][0].title == "Porto"
        let_in.close()
        stranger = RemoteRetriever(url, retries=0)
        with pytest.raises(Exception, match="HTTP 401") as raised:
            stranger.search(["river"], [1])
        assert TOKEN not in str(raised.value)
        stranger.close()


def test_a_body_above_the_limit_is_refused_whatever_its_header_says():
    client = TestClient(app(), base_url="http://localhost")
    too_much = b'{"queries": ["' + b"x" * LARGEST_REQUEST + b'"]}'
    assert client.post("/retrieve", content=too_much).status_code == 413

    def pieces():  # no content-length
        for _ in range(LARGEST_REQUEST // 2**20 + 1):
            yield b" " * 2**20

    assert client.post("/retrieve", content=pieces()).status_code == 413
    assert client.post("/retrieve", content=b"", headers={"Content-Length": "9" * 30}).status_code == 413
    assert client.post("/retrieve", json={"queries": ["river"]}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.7", "myhost", "127.0.0.1.evil.org", "localhost."])
def test_an_address_that_others_reach_needs_a_token(host, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RETRIEVER_TOKEN", raising=False)
    assert not is_loopback(host)
    line = ["serve-retriever", "index=nowhere", f"host={host}"]
    assert main(line) == 2 and "host: got" in capsys.readouterr().err
    unset = "token_env: the environment variable RETRIEVER_TOKEN is not set"
    # the index is looked for once the rest is right
    for token, says in ((None, unset), ("short", "holds no token"), (TOKEN, "nowhere")):
        if token is not None:
            monkeypatch.setenv("RETRIEVER_TOKEN", token)
        assert main([*line, "token_env=RETRIEVER_TOKEN"]) == 2
        shown = capsys.readouterr().err
        assert says in shown and TOKEN not in shown


def test_loopback_addresses_need_no_token():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))


# -- the vLLM server that mmrl starts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["--host=0.0.0.0", "--host", "--port=80", "--uds", "--config=x.yaml", "--api_key=x"])
def test_no_argument_opens_the_vllm_server_to_others(word):
    (problem,) = vllm_problems(VllmServerConfig(name="vllm_server", args=(word,)))
    assert problem.startswith(f"engine.args: got {word.partition('=')[0]};")


def test_code_of_a_model_runs_with_a_loud_line_alone(caplog):
    setup = EngineSetup(weights=ModelConfig(name="strange", path="org/strange"), device="cpu")
    for args, loud in [((), 0), (("--trust-remote-code",), 1), (("--trust_remote_code=true",), 1)]:
        caplog.clear()
        engine_arguments(VllmServerConfig(name="vllm_server", args=args), setup, "org/strange", "raw", 0, 0)
        assert caplog.text.count("RUNNING CODE OF THE MODEL") == loud


# -- whose code runs ---------------------------------------------------------------------------------------------------


def calls():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield f"{path.relative_to(TOP)}:{node.lineno}", ast.unparse(node.func), node


def test_no_text_is_run_and_no_pickle_is_read():
    bad = re.compile(r"(?:builtins\.)?(?:eval|exec|compile)|(?:c?pickle|cloudpickle|dill|marshal|shelve|joblib)\.\w+")
    found = [f"{where} {name}" for where, name, _ in calls() if bad.fullmatch(name)]
    assert not [place for place in found if not place.startswith("scripts/notebook.py:")]  # cells of docs/notebooks
    imports = re.compile(r"^\s*(?:import|from) (?:pickle|cloudpickle|dill|marshal|shelve)\b", re.MULTILINE)
    assert not [path for path in SOURCES if imports.search(path.read_text(encoding="utf-8"))]


def test_what_is_loaded_is_weights_alone():
    for where, name, call in calls():
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        # The chaos harness compares what two runs of its own have just written; nothing else is handed to it.
        if name.endswith("torch.load") and not where.startswith("scripts/chaos/compare.py"):
            assert options.get("weights_only") == "True", where
        if name.endswith(("np.load", "numpy.load")):
            assert "allow_pickle" not in options, where
        if re.fullmatch(r"yaml\.\w*load\w*", name):  # what is called on its result has a longer name
            assert name == "yaml.safe_load", where
        # `kind`: of whatever class `mmrl.models.load` loads
        if re.fullmatch(r"(Auto\w+|kind)\.from_(pretrained|config)", name) and "config" not in name:
            shown = ast.unparse(call)
            assert "trust_remote_code=False" in shown or "**NO_CODE" in shown, where
    assert "kind.from_pretrained(" in (TOP / "mmrl/models/load.py").read_text()


def test_a_model_with_code_of_its_own_is_refused_without_a_question(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    (tmp_path / "configuration_x.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "strange", "auto_map": {"AutoConfig": "configuration_x.XConfig"}})
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at the terminal"))
    with pytest.raises(ConfigError, match="custom code"):
        load_configs(ModelConfig(name="x", path=str(tmp_path)))
    assert not ran.exists()


# -- names that would lead elsewhere -----------------------------------------------------------------------------------

ESCAPES = ["../x", "..", "/etc/x", "a/../../x", "~/x", "x/y", ".", "a\\b", "a\nb"]


@pytest.mark.parametrize("name", ESCAPES)
def test_no_name_leads_out_of_its_folder(name, tmp_path, monkeypatch, capsys):
    here = tmp_path / "above" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    lines = [
        ["new-task", name],
        ["compare", "algo=grpo", "seed=0", f"name={name}"],
        ["compare", f"set={name}"],
        ["credit", f"algo={name}", "rollouts=x"],
        ["train", f"algo='{name}'"],
        ["train", f"++task.name='{name}'"],
        ["train", f"++algo.name='{name}'"],
    ]
    for words in lines:
        assert main(words) == 2, words
    assert "Traceback" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["above", "here"]


def test_links_in_a_run_directory_are_removed_and_never_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "step-000009.jsonl.gz").write_text("mine")
    with RunDir.create(tmp_path / "run", {}, ["mmrl"]) as run:
        (run.path / "journal" / "step-000007.jsonl.gz").symlink_to(precious / "step-000009.jsonl.gz")
        (run.path / "eval" / "step-000008-dev.jsonl").symlink_to(precious)
        run.truncate_after(1)
    assert not list((run.path / "journal").iterdir()) and not list((run.path / "eval").iterdir())
    assert (precious / "step-000009.jsonl.gz").read_text() == "mine"
    # leftovers of a start that was killed at once, one of them a link
    left = tmp_path / "left"
    left.mkdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    (left / "journal").symlink_to(empty)
    assert run_state(left) == "new"
    assert empty.is_dir() and not left.exists()


def test_a_run_directory_that_is_a_link_is_left_alone(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="something else, which was not touched"):
        run_state(tmp_path / "link")
    assert stat.S_ISDIR((tmp_path / "real").stat().st_mode)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://user:hunter-two-2@host/v1", "user or password"),
        ("user:hunter-two-2@host", "user or password"),
        ("http://host/v1?api_key=hunter-two-2", "secret in its query (api_key)"),
        ("http://host/v1?a=1&token=hunter-two-2", "secret in its query (token)"),
        ("host", "got 'host', expected http://"),
    ],
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(url, says):
    problem = address_problem(url)
    assert problem is not None and says in problem and "hunter" not in problem
    assert address_problem("https://host:8000/v1?api-version=2024-06-01") is None


def test_what_the_page_on_security_names_exists():
    page = (TOP / "SECURITY.md").read_text(encoding="utf-8")
    for path in re.findall(r"`(tests/[\w/]+\.py)`", page):
        assert (TOP / path).is_file(), path
    here = Path(__file__).read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", page)
    assert named and [name for name in named if f"def {name}(" not in here] == []
