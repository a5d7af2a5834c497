"""What a command line composes: shipped and own configs, sweeps, values that are refused together."""

from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

import mmrl
from mmrl.algorithms import ALGORITHMS
from mmrl.cli import main
from mmrl.cli.arguments import sort_words
from mmrl.cli.configs import configured, train_configs
from mmrl.cli.hydra import composed
from mmrl.cli.overrides import read_line
from mmrl.config import (
    ALGO_SCHEMAS,
    TASK_SCHEMAS,
    EvalRunConfig,
    RlRunConfig,
    validate,
)
from mmrl.config.base import path_override
from mmrl.config.prompts import PROMPT_SCHEMAS
from mmrl.config.sft import SFT
from mmrl.errors import ConfigError
from mmrl.system.conf import GROUPS, conf_dir, options
from tests.helpers.lines import refused

NAMES = st.text(
    st.sampled_from("\\\"'{}[](),= ~$:#") | st.characters(codec="utf-8", exclude_characters="\0"), min_size=1
)
ODD = st.sampled_from(("1e5", "null", "True", "NaN", ".5", "-1", "outputs/a", "../a", "2026-11-28_s0"))


@given(NAMES | ODD)
def test_a_path_of_any_name_is_read_as_it_is(name: str) -> None:
    assert str(OverridesParser.create().parse_override(path_override("run.dir", name)).value()) == name


def test_a_path_that_needs_quotes_is_shown_in_them() -> None:
    path, mapping = refused("task.data.train=it's ü.jsonl", "model.lora={r: 4")
    assert path.endswith("; in quotes: 'task.data.train=\"it'\"'\"'s ü.jsonl\"'")
    assert "in quotes" not in mapping


def test_names_in_yaml_registry_and_schema_are_the_same():
    assert sorted(ALGO_SCHEMAS) == sorted(ALGORITHMS) == sorted(algorithm.name for algorithm in ALGORITHMS.values())
    raw: Any = {name: composed("train", [f"algo={name}"]) for name in options("algo")}
    assert sorted(raw) == sorted([*ALGO_SCHEMAS, *PROMPT_SCHEMAS, SFT])
    assert all(raw[name]["algo"]["name"] == name for name in raw)


@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={path.relative_to(conf_dir() / group).with_suffix('').as_posix()}"
        for group in GROUPS
        if group != "experiment"  # of users alone
        for path in sorted((conf_dir() / group).rglob("*.yaml"))
    ],
)
def test_every_shipped_config_composes_and_validates(choice):
    # Two leave a key to the user.
    path = {"model=hf": ["++model.path=a/b"], "algo=distill": ["++algo.distill={a: policy}"]}.get(choice, [])
    config = configured([choice, *path])
    group, _, name = choice.partition("=")
    if group in ("task", "algo", "model", "hardware", "engine"):
        assert getattr(config, group).name == name
    if isinstance(config, RlRunConfig):
        assert type(config.task) is TASK_SCHEMAS[config.task.name]
        assert type(config.algo) is ALGO_SCHEMAS[config.algo.name]
    if group in ("model", "hardware", "engine"):
        assert validate(EvalRunConfig, composed("eval", [choice, *path, "++policy=tiny"])).policy == "tiny"


def test_the_tiny_model_scales_every_algorithm_down():
    for algo in ALGO_SCHEMAS:
        left = ["algo.distill={a: policy}"] if algo == "distill" else []
        config: Any = configured([f"algo={algo}", "model=tiny", *left])
        assert config.train.batch_size <= 64
        assert config.model.lora is None


def test_a_sweep_isvalidated_whole_before_anything_runs():
    found = train_configs(read_line(["-m", "algo=mhgpo_fof,mhgpo_rr", "seed=1,2"]))
    assert [f"{c.algo.name} {c.seed}" for c in found] == ["mhgpo_fof 1", "mhgpo_fof 2", "mhgpo_rr 1", "mhgpo_rr 2"]
    assert refused("-m", "seed=1,x,y") == ["seed: got 'x', expected integer", "seed: got 'y', expected integer"]


def test_the_users_conf_folder_overlays_the_shipped_one(tmp_path, monkeypatch):
    (tmp_path / "conf" / "algo").mkdir(parents=True)
    (tmp_path / "conf" / "model").mkdir()
    top = "# @package _global_\n"
    (tmp_path / "conf/algo/mine.yaml").write_text(f"{top}algo: {{name: mhgpo_rr, group_size: 7}}\n")
    (tmp_path / "conf/model/tiny.yaml").write_text(f"{top}model: {{name: tiny, path: tiny}}\ntrain: {{lr: 0.5}}\n")
    monkeypatch.chdir(tmp_path)
    assert "mine" in options("algo")
    config: Any = configured(["algo=mine"])
    assert (config.algo.group_size, config.train.lr) == (7, 0.5)
    monkeypatch.chdir(Path(__file__).parents[1])
    assert "mine" not in options("algo")
    config = configured([])
    assert config.train.lr == 3e-4
    config = configured(["algo=mine"], str(tmp_path / "conf"))
    assert config.algo.group_size == 7


def test_a_typed_mapping_of_free_names_is_all_there_is(tmp_path):
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo/mine.yaml").write_text("defaults: [grpo]\ndistill: {rewriter: policy, answerer: initial}\n")

    def distill(*words, **settings):
        config: Any = mmrl.compose("algo=mine", *words, config_dir=tmp_path, **settings)
        return config.algo.distill

    both, initial = {"rewriter": "policy", "answerer": "initial"}, {"rewriter": "initial"}
    assert distill() == both and distill("algo.distill.rewriter=initial") == both | initial
    assert distill("algo.distill={rewriter: initial}") == initial == distill(algo={"distill": initial})
    assert distill("algo.distill.reranker=policy", "algo.distill={rewriter: initial}") == initial | {
        "reranker": "policy"
    }
    lora: Any = mmrl.compose("model.lora={r: 8, alpha: 32}", model={"lora": {"dropout": 0.5}})
    assert (lora.model.lora.r, lora.model.lora.alpha, lora.model.lora.dropout) == (8, 32, 0.5)


def test_a_name_with_a_colon_a_comma_or_a_space_is_typed_behind_a_backslash():
    def fanout(*words, **settings):
        config: Any = mmrl.compose("algo=c3", *words, **settings)
        return config.algo.fanout

    assert fanout("algo.fanout={agent: 2, agent\\:1: 3}") == {"agent": 2, "agent:1": 3}
    for names in ({"agent": 2, "agent:1": 3}, {"a b, c": 2, "d\\e(": 3}):
        assert fanout(**{"algo.fanout": names}) == names
    assert fanout(algo={"fanout": {1: 2}}) == {"1": 2}
    for text, says in [
        ("{a:1: 3}", "a: got '1: 3', expected"),
        ("{a: 2, a:1: 3}", "a: given more than once; a colon in"),
    ]:
        with pytest.raises(ConfigError, match=r"a colon in a name is typed \\:$") as caught:
            fanout(f"algo.fanout={text}")
        assert says in str(caught.value)
    with pytest.raises(ConfigError, match=r"algo\.fanout: got the name 'é', which has no word"):
        fanout(**{"algo.fanout": {"é": 2}})


def test_a_config_file_that_cannot_be_read_is_named_with_the_line(tmp_path, monkeypatch, errors_of):
    (tmp_path / "conf" / "algo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/algo/mine.yaml").write_text("name: grpo\nclip: 0.1\nclip: 0.2\nclip: 0.3\n")
    (tmp_path / "conf/algo/other.yaml").write_text("name: grpo\nclip: [0.1\n")
    lines = errors_of("train", "-m", "algo=mine,other").splitlines()
    assert lines[:2] == [f"error: {tmp_path}/conf/algo/mine.yaml:{line}: clip: given more than once" for line in (3, 4)]
    assert lines[2].startswith(f"error: {tmp_path}/conf/algo/other.yaml:3: cannot be read: not YAML (")


def test_tiny_stands_for_the_shipped_model_that_plays_the_task():
    found = validate(EvalRunConfig, composed("eval", ["task=papillon", "++policy=tiny"]))
    assert (found.policy, found.model.path) == ("tiny_dspy", "tiny_dspy")
    teachers = "algo.teachers=[{name: student}, {name: gpt, policy: tiny}]"
    config: Any = configured(["task=banking77", "algo=mmgrpo", teachers])
    assert (config.model.name, config.model.path) == ("tiny", "tiny_dspy")
    assert [teacher.policy for teacher in config.algo.teachers] == [None, "tiny_dspy"]
    own = configured(["task=banking77", "model=hf", "model.path=some/folder"])
    assert own.model.path == "some/folder"
    assert configured(["task=tool_agent"]).model.path == "tiny"


def test_no_row_may_be_said(tmp_path, monkeypatch, capsys, errors_of):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\ntrain: {steps: 3}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=null", "--cfg", "job"]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert errors_of("train", "-m", "experiment=null,mine", "seed=x").startswith("error: seed: got 'x'")


@pytest.mark.parametrize("above", ["", "# mine\n# @package _global_\n", "---\n# @package _global_\n"])
def test_an_experiment_that_is_not_said_to_be_of_the_whole_config_is_refused(above, tmp_path, monkeypatch):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text(f"{above}train: {{steps: 3}}\nseed: 4\n")
    (tmp_path / "conf/experiment/fine.yaml").write_text("\n#@package _global_\n# mine\nseed: 4\n")
    monkeypatch.chdir(tmp_path)
    said = "experiment: mine.yaml sets train, seed without effect; its first line must be # @package _global_"
    assert refused("experiment=mine") == [said]
    assert refused("experiment.seed=3") == [
        "experiment.seed: unknown key; experiment=NAME takes conf/experiment/NAME.yaml"
    ]
    assert configured(["experiment=fine"]).seed == 4


def test_a_path_that_exists_is_a_name_also_with_an_equals_sign(tmp_path, monkeypatch):
    (tmp_path / "x" / "seed=0").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "x")
    words = ["seed=0", "./seed=0", "../x/seed=0", "x/seed=1", "eval.items=3"]
    assert sort_words(words)[:2] == (["./seed=0", "../x/seed=0"], ["seed=0", "x/seed=1", "eval.items=3"])
