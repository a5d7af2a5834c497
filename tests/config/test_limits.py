"""Values that belong to one model: what `tiny` shortens, what the papers have, and what leaks into no other model."""

import json
from typing import Any

import pytest

from mmrl.cli.configs import configured
from mmrl.config import DataConfig, RlRunConfig, validate_stored
from tests.helpers.lines import evaluation, refused

# Of a task, those of its paper and those of `tiny`, with which the runs of README and docs/performance.md were made.
# The papers: arXiv 2505.11821, 2508.04660, 2506.02718 (whose parent's code has 100), and our choice for its reasoning
# baselines.
LIMITS = {
    "search_agent": {"max_tokens": (500, 48), "max_observation": (500, 500), "max_context": (4096, 4096)},
    "tool_agent": {
        "max_tokens": (1024, 64),
        "max_completion": (1024, 256),
        "max_observation": (1024, 500),
        "max_context": (4096, 4096),
    },
    "banking77": {"max_tokens": (1032, 64), "max_context": (32768, 4096)},
    "papillon": {"max_tokens": (1032, 100), "max_context": (32768, 4096)},
    "hover": {"max_tokens": (1032, 96), "max_context": (32768, 4096)},
    "dspy": {"max_tokens": (1032, 100), "max_context": (None, None)},
    "agent": {"max_tokens": (1024, 100), "max_context": (None, None)},
    "hotpotqa": {"max_tokens": (100, 100), "max_context": (None, None)},
    "2wiki": {"max_tokens": (100, 100), "max_context": (None, None)},
    "musique": {"max_tokens": (100, 100), "max_context": (None, None)},
    "qa_direct": {"max_tokens": (100, 64)},
    "search_o1": {"max_tokens": (2048, 64), "max_observation": (1024, 500), "max_context": (32768, 4096)},
    "r1_searcher": {"max_tokens": (512, 64), "max_observation": (1024, 500), "max_context": (8192, 4096)},
}


@pytest.mark.parametrize("task", LIMITS)
def test_limits_are_the_papers_and_the_tiny_model_shortens_them(task):
    paper, tiny = (configured([f"task={task}", *words]).task for words in (["model=hf", "model.path=a/b"], []))
    assert {key: (getattr(paper, key), getattr(tiny, key)) for key in LIMITS[task]} == LIMITS[task]


@pytest.mark.parametrize(("model", "lora", "lr"), [("smollm2_135m", 16, 2e-4), ("smollm2_135m_full", None, 1e-5)])
def test_a_small_real_model_has_a_profile_and_limits_of_its_own(model, lora, lr):
    config: Any = configured(["task=hotpotqa", f"model={model}"])
    assert (config.model.lora.r if config.model.lora else None, config.train.lr) == (lora, lr)
    assert (config.task.max_tokens, config.task.retriever.top_k, config.task.retriever.snippet_words) == (64, 5, 40)
    evaluated = evaluation(f"model={model}", "task=hotpotqa")
    assert evaluated.task == config.task and evaluated.policy == config.model.path
    assert configured(["task=banking77", f"model={model}"]).task.max_tokens == 100


def test_a_typed_limit_wins_over_the_tiny_models():
    assert configured(["task=search_agent", "++task.max_tokens=70"]).task.max_tokens == 70


def test_a_users_own_model_may_have_limits_too(tmp_path, monkeypatch):
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/limits/mine").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("# @package _global_\nmodel: {name: mine, path: a/b}\n")
    (tmp_path / "conf/limits/mine/search_agent.yaml").write_text("# @package _global_\ntask: {max_tokens: 77}\n")
    monkeypatch.chdir(tmp_path)
    assert configured(["task=search_agent", "model=mine"]).task.max_tokens == 77
    assert configured(["task=tool_agent", "model=mine"]).task.max_tokens == 1024


@pytest.mark.parametrize("algo", ["mhgpo_rr", "mmgrpo", "mt_ppo", "grpo"])
def test_nothing_of_the_tiny_model_is_in_another_one(algo):
    paper: Any
    config: Any
    config, paper = (
        configured([f"algo={algo}", *words])
        for words in (("model=hf", "model.path=a/b"), ("model=llama31_8b_instruct",))
    )
    assert (config.model.name, config.model.path, config.model.dtype) == ("hf", "a/b", "auto")
    assert config.model.gradient_checkpointing and config.model.lora is not None
    assert (config.model.lora.r, config.model.lora.everywhere) == (16, True)
    assert config.algo == paper.algo, "the paper's beta among others"
    assert config.train == paper.train.model_copy(update={"lr": 1e-5})


@pytest.mark.parametrize("path", ["some/model", "./nowhere"])
def test_other_weights_under_the_tiny_model_are_refused_with_what_to_type(path):
    (problem,) = refused(f"++model.path={path}")
    assert problem.startswith(f"model.path: got '{path}'") and f"use model=hf model.path={path}" in problem


def test_a_stored_run_with_other_weights_goes_on():
    stored = configured([]).model_dump(mode="json")
    stored["model"]["path"] = "some/model"
    assert validate_stored(RlRunConfig, stored).model.path == "some/model"


def test_the_neutral_model_wants_a_path():
    (problem,) = refused("model=hf")
    assert problem.startswith("model.path: missing")


# --- the model of an evaluation


def run_folder(folder, **model):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({"task": {"name": "search_agent"}, "model": model}))
    return str(folder)


def test_an_evaluation_takes_the_model_of_its_policy(tmp_path):
    tiny = evaluation("policy=tiny", "task=search_agent")
    assert (tiny.model.name, tiny.task.max_tokens) == ("tiny", 48)
    other = evaluation("policy=some/model", "task=search_agent")
    assert (other.model.name, other.model.path, other.task.max_tokens) == ("hf", "some/model", 500)
    assert other.model.dtype == "auto"
    run = run_folder(tmp_path / "a", name="tiny", path="tiny_qa")
    assert evaluation(f"policy={run}", "task=search_agent").task.max_tokens == 48
    run = run_folder(tmp_path / "b", name="llama31_8b_instruct", path="x/y", chat_template="it's.jinja", thinking=True)
    found = evaluation(f"policy={run}", "task=search_agent").model
    assert (found.name, found.chat_template, found.thinking) == ("llama31_8b_instruct", "it's.jinja", True)
    assert evaluation(f"policy={run}", "++model.thinking=false").model.thinking is False


def test_an_endpoints_model_has_the_papers_limits_and_a_tokenizer_that_is_here():
    found = evaluation("policy=gpt", "engine=openai", "task=banking77")
    assert (found.task.max_tokens, found.model.path) == (1032, "tiny_dspy")


def test_a_model_that_is_typed_is_the_model_of_an_evaluation():
    assert evaluation("policy=some/model", "model=qwen3_8b").model.name == "qwen3_8b"
    assert evaluation("policy=some/model", "model=tiny", "task=search_agent").task.max_tokens == 48


# --- splits


def test_beside_a_file_a_split_without_one_is_absent():
    assert DataConfig(train="a.json").model_dump(exclude_unset=False)["dev"] is None
    assert DataConfig(train="a.json").files == {"train": "a.json"}
    assert [DataConfig().source_of(split) for split in ("train", "dev", "test")] == ["mini"] * 3
    assert [DataConfig(train="mini").source_of(s) for s in ("train", "dev", "test")] == ["mini"] * 3
    with pytest.raises(ValueError, match="train: got null, expected a file, a hub id or a Python list, or mini"):
        DataConfig(train=None)
    mixed = DataConfig(train="a.json", dev="mini")
    assert (mixed.dev, mixed.test) == ("mini", None)
