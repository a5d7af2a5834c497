"""What `policy=` accepts."""

import json
import shutil

import pytest

from mmrl.config import ModelConfig
from mmrl.errors import ConfigError
from mmrl.models.load import tokenizer_section, weights_section
from mmrl.store.policy import Policy, is_shipped, model_of, other_task, resolve

OF_PROMPTS = {"weights": "smollm2_135m", "prompts": None, "task": "hotpotqa"}


def checkpoint(folder, step, adapter=False):
    path = folder / "checkpoints" / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if adapter:
        (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone"}))
    else:
        (path / "config.json").write_text("{}")
    (path / "complete.json").write_text(json.dumps({"step": step, "files": {}}))
    return path


@pytest.mark.parametrize("text", ["tiny", "Qwen/Qwen3-8B"])
def test_names_and_hub_ids_stand_for_themselves(text):
    assert resolve(text) == Policy(base=text)


def test_a_run_is_its_newest_checkpoint_by_number(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {path: tiny}\n")
    for step in (9, 10, 2):
        newest = checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "checkpoint-11.tmp").mkdir()
    found = resolve(str(tmp_path))
    assert (found.base, found.step) == (str(newest.parent / "checkpoint-10"), 10)


def test_an_adapter_of_a_run_takes_the_runs_base(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {path: Qwen/Qwen3-8B}\n")
    path = checkpoint(tmp_path, 5, adapter=True)
    assert resolve(str(tmp_path)) == Policy(base="Qwen/Qwen3-8B", adapter=str(path), step=5)


@pytest.mark.parametrize("file", ["config.yaml", "policy.json"])
def test_a_run_of_a_model_of_mmrl_fetch_is_refused(file, tmp_path):
    content = {"config.yaml": "model: {path: smollm2_135m}\n", "policy.json": json.dumps(OF_PROMPTS)}
    (tmp_path / file).write_text(content[file])
    checkpoint(tmp_path, 5, adapter=True)
    with pytest.raises(ConfigError, match=r"^policy: got 'smollm2_135m', .*fetch_model smollm2_135m FOLDER"):
        resolve(str(tmp_path))


def test_a_policy_of_another_task_is_told(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("model: {path: tiny}\ntask: {name: search_agent}\n")
    newest = checkpoint(tmp_path, 5)
    (newest / "agent").mkdir()
    told = {"trained on": "search_agent"}
    for folder in (tmp_path, newest, newest / "agent"):
        assert other_task(str(folder), "hotpotqa") == told
        assert other_task(str(folder), "search_agent") == {}
    monkeypatch.chdir(tmp_path)
    assert other_task("tiny", "hotpotqa") == other_task("Qwen/Qwen3-8B", "hotpotqa") == {}


def test_settings_of_a_run_that_change_its_policys_replies_are_named(tmp_path):
    checkpoint(tmp_path, 5)
    settings = {"dtype": "bfloat16", "attention": "auto", "matmul": "onednn", "thinking": True, "revision": None}
    model = {"name": "qwen", "path": "owner/base", "lora": {"r": 4}, **settings}
    (tmp_path / "config.yaml").write_text(json.dumps({"model": model}))
    assert model_of(str(tmp_path)) == ("qwen", {"dtype": "bfloat16", "matmul": "onednn", "thinking": True})


def test_an_adapter_alone_names_its_base_itself(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    assert resolve(str(tmp_path)) == Policy(base="owner/base", adapter=str(tmp_path))


def test_an_adapter_alone_has_its_own_revision_and_tokenizer(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base", "revision": "v2"}')
    assert resolve(str(tmp_path)) == Policy(base="owner/base", adapter=str(tmp_path), revision="v2")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    policy, model = resolve(str(tmp_path)), ModelConfig(name="x", path="other")
    assert policy.tokenizer == str(tmp_path)
    assert weights_section(policy, model) == ModelConfig(name="x", path="owner/base", revision="v2")
    assert tokenizer_section(policy, model) == ModelConfig(name="x", path=str(tmp_path))
    typed = ModelConfig(name="x", path="other", revision="v3", thinking=True)
    assert weights_section(policy, typed).revision == "v3" and tokenizer_section(policy, typed).thinking
    run = tmp_path / "run" / "checkpoints" / "checkpoint-3"
    shutil.copytree(tmp_path, run, ignore=shutil.ignore_patterns("run"))
    (tmp_path / "run" / "config.yaml").write_text("model: {path: owner/base}")
    assert resolve(str(run)) == Policy(base="owner/base", adapter=str(run), step=3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "nowhere", "expected a run"),
        (lambda p: p, "holds neither"),
        (lambda p: (p / "config.yaml").write_text("model: {path: tiny}") and p, "no checkpoint yet"),
    ],
)
def test_paths_without_weights_are_refused(make, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        resolve(str(make(tmp_path)))


@pytest.mark.parametrize("name", ["phi-2", "run-7"])
def test_a_folder_of_weights_is_no_training_step(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    assert resolve(str(tmp_path / name)).step is None
    assert resolve(str(checkpoint(tmp_path, 12))).step == 12


RECORDS = [
    (b"\xfb", "Invalid JSON: "),
    (b"{", "Invalid JSON: "),
    (b"[]", "Input should be an object"),
    (b"[" * 100_000, "recursion"),
    (b'{"modules": "abc"}', "modules: Input should be an object"),
    (b'{"modules": {"a": 1}}', "modules.a: Input should be a valid string"),
    (b'{"base": [1]}', "base: Input should be a valid string"),
    *(
        (json.dumps({"modules": {"a": name}}).encode(), f"got '{name}', expected the name of a folder")
        for name in ("../../evil", "..", ".", "", "/evil", "a/b")
    ),
]
ADAPTERS = [
    *RECORDS[:4],
    (b"null", "Input should be an object"),
    (b"{}", "base_model_name_or_path: Field required"),
    (b'{"base_model_name_or_path": null}', "base_model_name_or_path: Input should be a valid"),
]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [*(("extra.json", *row) for row in RECORDS), *(("adapter_config.json", *row) for row in ADAPTERS)],
)
def test_a_damaged_or_hostile_file_of_a_checkpoint_is_refused_in_a_line(name, content, says, tmp_path):
    file = checkpoint(tmp_path, 3) / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        resolve(str(file.parent))
    (problem,) = caught.value.problems
    assert problem.startswith(f"policy: {file} cannot be read (") and says in problem
    assert problem.endswith("); restore it") and "\n" not in problem


def test_policies_that_name_each_other_are_refused(tmp_path):
    for one, other in (("a", "b"), ("b", "a")):
        (tmp_path / one).mkdir()
        content = {"weights": str(tmp_path / other), "prompts": None, "task": None}
        (tmp_path / one / "policy.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="its weights lead back to itself"):
        resolve(str(tmp_path / "a"))


def test_runs_that_began_with_each_other_are_no_shipped_model(tmp_path):
    for one, other in (("a", "b"), ("b", "a")):
        checkpoint(tmp_path / one, 1)
        (tmp_path / one / "config.yaml").write_text(f"model: {{path: {tmp_path / other}}}\n")
    assert not is_shipped(str(tmp_path / "a"))
    (tmp_path / "b" / "config.yaml").write_text("model: {path: tiny}\n")
    assert is_shipped(str(tmp_path / "a"))
