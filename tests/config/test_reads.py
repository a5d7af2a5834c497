"""Every key that a config accepts is read by the code that acts on it, seen in tiny runs, or stands on a list.

A key that is read may still change nothing: `test_effects.py` has those that must matter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import dspy
import httpx
import pytest
from pydantic import BaseModel

from mmrl.cli.configs import configured, eval_configs, train_configs
from mmrl.cli.overrides import read_line
from mmrl.config import (
    ALGO_SCHEMAS,
    ENGINE_SCHEMAS,
    RETRIEVER_SCHEMAS,
    TASK_SCHEMAS,
    EvalRunConfig,
    ModelConfig,
    PromptRunConfig,
    RlRunConfig,
    SftRunConfig,
    TrainConfig,
)
from mmrl.config.engines import OpenAIConfig
from mmrl.config.prompts import PROMPT_SCHEMAS
from mmrl.config.sft import SftConfig
from mmrl.config.tasks import BUILT_IN
from mmrl.config.validate import sections_of
from mmrl.engines.endpoint_engine import with_model
from mmrl.engines.vllm.base import PROBE, probe_logprobs
from mmrl.models.chat import render_prompt
from mmrl.models.load import load_model, load_tokenizer
from mmrl.run import build
from mmrl.run.check import Checked, check_all
from mmrl.run.eval import evaluate_policy
from mmrl.run.session import begin
from mmrl.system.conf import later_wins
from tests.helpers import TOP
from tests.helpers.engines import tiny_bert
from tests.helpers.fake_vllm import fake_vllm
from tests.helpers.lines import refused
from tests.helpers.reads import Key, reads
from tests.helpers.servers import chat_reply, good_app, listening, serving

COMMANDS: Mapping[str, type[BaseModel]] = {
    "rl": RlRunConfig,
    "prompts": PromptRunConfig,
    "sft": SftRunConfig,
    "eval": EvalRunConfig,
}
CHOSEN: Mapping[str, type[BaseModel]] = {
    **{f"algo.{name}": schema for name, schema in (ALGO_SCHEMAS | PROMPT_SCHEMAS).items()},
    "algo.sft": SftConfig,
    **{f"task.{name}": TASK_SCHEMAS[name] for name in BUILT_IN},
    **{f"engine.{name}": schema for name, schema in ENGINE_SCHEMAS.items()},
    **{f"retriever.{name}": schema for name, schema in RETRIEVER_SCHEMAS.items()},
}
"""Sections with a schema for each name. What reads them need not be of one kind of run."""

SMALL = (
    *("hardware=cpu", "hardware.threads=1", "eval.items=1", "eval.bootstrap=100", "task.max_tokens=32"),
    "task.data.train_items=16",
)
STEP = ("eval.every=0", "train.steps=1", "train.batch_size=2")
FEW = "algo.validation_items=4 algo.train_items=4"
PAIRS = "algo.group_size=2 algo.zero_variance=refill algo.refill_rounds=1"
ENDPOINT = "url: SERVER, key_env: null, model: m"
MINI_AGENT = "tests.helpers.agents"
FILES = f"task.data.train={MINI_AGENT}:TRAIN task.data.dev={MINI_AGENT}:DEV task.inputs=[question]"
METRICS = f"task.metric=[{__name__}:right] task.metric_weights=[1]"
AGENT = f"task=agent task.agent={__name__}:agent {METRICS} task.modules=[one,two] {FILES}"
RUNS = (
    f"rl algo=grpo task=qa_direct {PAIRS} run.report_to=[tensorboard]",
    f"rl algo=mhgpo_is {PAIRS} algo.freeze_modules=[reranker] algo.frozen_serving=true",
    f"rl algo=mhgpo_fof task=2wiki {PAIRS} model.lora={{}} model.modules={{}}",
    f"rl algo=mhgpo_rr task=musique {PAIRS} engine.endpoints={{reranker: {{{ENDPOINT}}}}}",
    f"rl algo=mhgpo_fof_os {PAIRS} task.retriever.name=remote task.retriever.url=RETRIEVER",
    f"rl algo=grpo {PAIRS} engine=vllm_server engine.python=VLLM model.lora={{}} train.lr=0",
    f"rl algo=grpo_mr task=search_agent {PAIRS}",
    f"rl algo=dr_mas task=search_o1 {PAIRS}",
    f"rl algo=c3 {PAIRS} algo.scale=true",
    f"rl algo=ccpo task=r1_searcher {PAIRS} algo.exchanged=[searcher] algo.scale=true",
    f"rl algo=gigpo task=tool_agent {PAIRS}",
    f"rl algo=igpo task=search_agent {PAIRS}",
    "rl algo=distill algo.distill={answerer: initial, rewriter: policy} algo.privileged={rewriter: answers}",
    f"rl algo=gigpo task=search_agent task.reward=privileged algo.privileged={{agent: answers}} {PAIRS}",
    f"rl algo=mt_grpo task=tool_agent {PAIRS}",
    f"rl algo=mt_grpo_variable task=search_agent {PAIRS}",
    "rl algo=tree_grpo algo.zero_variance=refill algo.refill_rounds=1",
    f"rl algo=mmgrpo task=hover algo.rollouts=2 {PAIRS} "
    f"algo.teachers=[{{name: student}},{{name: other, endpoint: {{{ENDPOINT}}}}}]",
    "rl algo=mappo algo.loss_mean=constant",
    "rl algo=ppo task=search_agent algo.loss_mean=constant",
    "rl algo=mt_ppo task=search_agent algo.loss_mean=constant",
    f"rl algo=grpo {AGENT} {PAIRS} task.rules=[{{pattern: title, reply: a}},{{pattern: question, module: one}}]",
    "rl algo=grpo task=environment task.environment=tests.helpers.worlds:Counter model.path=tiny_agent "
    f"{METRICS} {PAIRS}",
    f"rl algo=grpo task=reasoning_gym task.dataset=chain_sum {PAIRS}",
    f"rl algo=grpo task=textarena task.game=TicTacToe-v0 task.opponent=policy task.max_turns=2 {PAIRS}",
    "sft algo=sft task=qa_direct from=FIRST model.lora={} model.modules={}",
    "sft algo=sft task=papillon algo.source=rollouts algo.rollouts=1 algo.min_reward=0 "
    f"task.external={{{ENDPOINT}, temperature: 0.5}}",
    f"prompts algo=miprov2 task=banking77 algo.auto=null algo.num_candidates=2 algo.num_trials=1 {FEW} "
    f"algo.prompt_model={{{ENDPOINT}}}",
    f"prompts algo=bootstrap_fewshot task=dspy task.program={__name__}:Answerer {METRICS} "
    f"{FILES} algo.num_candidate_programs=0 {FEW}",
    f"prompts algo=gepa task=banking77 algo.auto=null algo.max_metric_calls=12 {FEW}",
    "eval policy=tiny task.retriever.name=dense task.retriever.model=BERT",
    f"eval policy=tiny task=papillon task.judge={{{ENDPOINT}}} eval.max_failed_share=1",
    f"eval policy=tiny task=search_agent task.reward=judge_outcome task.judge={{{ENDPOINT}, on_unreadable: rule}}",
    f"eval policy=tiny task=tool_agent task.reward=judge_outcome task.judge={{{ENDPOINT}, on_unreadable: rule}}",
    "eval policy=m engine=openai engine.endpoint.url=SERVER engine.endpoint.key_env=null",
)


class Answerer(dspy.Module):
    """A program of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question: str) -> Any:
        return self.answer(question=question)


def right(record: Any, prediction: Any) -> float:
    return float(len(str(prediction)) % 2)


async def agent(example: Any, base_url: str, api_key: str) -> str:
    """An agent of one's own, two of whose requests do not name their module."""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        for model, system in (("m", "a title"), ("m", "a question"), ("policy/two", "")):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": example["question"]}]
            reply = await client.post(f"{base_url}/chat/completions", json={"model": model, "messages": messages})
    return str(reply.json()["choices"][0]["message"]["content"])


Leaf = tuple[str, tuple[type[BaseModel], str]]
"""Section and path in it, with a space between, as the lists below have them; the class that has the key."""

PROCESSES = "tests/run/test_processes.py"
OPENENV, MCP = "tests/tasks/environments/test_openenv.py", "tests/tasks/environments/test_mcp.py"
DISTILLATION = "tests/stages/test_distillation.py"
HELD = {
    # read where an algorithm has a teacher, which two of them have here
    "algo.* distill_coef": "tests/credit/test_distillation.py::test_worked_numbers",
    "task.* privileged": f"{DISTILLATION}::test_evidence_is_a_turns_reward_and_its_text_stands_in_the_first_prompt",
    # read only with several processes, on GPUs, or by a library that is not here
    "[rp]* hardware.rollout_devices": f"{PROCESSES}::test_gpus_of_the_managed_server",
    "rl hardware.sharding": f"{PROCESSES}::test_accelerate_launch_sets_the_same_variables",
    "rl hardware.cpu_offload": f"{PROCESSES}::test_accelerate_launch_sets_the_same_variables",
    "rl hardware.ray.address": "tests/ray/test_ray_refused.py::test_no_cluster",
    "rl hardware.ray.max_failures": "tests/ray/test_ray_runs.py::"
    "test_a_process_lost_too_often_ends_the_run_which_can_go_on",
    "* run.tags": "tests/report/test_trackers.py::test_wandb_gets_group_and_tags",
    "[ps]* run.group": "tests/report/test_trackers.py::test_wandb_gets_group_and_tags",
    "[ps]* run.wandb_project": "tests/report/test_trackers.py::test_wandb_gets_group_and_tags",
    "engine.vllm_server gpu_memory": "tests/engines/test_server.py::test_how_the_server_is_started",
    "engine.vllm_colocated *": "tests/engines/test_colocated.py::test_vllm_is_started_as_the_section_says",
    # read by the code that refuses, or before there is a config
    "* hardware.name": f"{PROCESSES}::test_profiles_that_cannot_work_are_refused",
    "* plugins": "tests/cli/test_plugins.py::test_the_documented_task_trains_from_the_users_own_folder",
    "algo.c3 max_leaves": "tests/algorithms/test_c3.py::test_a_plan_of_too_many_leaves_is_refused",
    "task.agent deterministic": "tests/run/test_agents.py::"
    "test_algorithms_that_play_an_agent_again_refuse_one_that_differs_each_time",
    "task.environment deterministic": "tests/run/test_agents.py::"
    "test_algorithms_that_play_an_agent_again_refuse_one_that_differs_each_time",
    # read where a run that has started from another is continued
    "* start.*": "tests/run/test_start.py::test_a_run_goes_on_where_the_one_that_it_started_from_was_extended",
    # of data that the mini world is not, or of replies that its models seldom write
    "task.hover sample": "tests/tasks/test_hover.py::test_the_papers_sample",
    "task.hover claim_hops": "tests/tasks/test_hover.py::test_claims_without_a_corpus_or_of_other_hops_are_refused",
    "task.papillon sample": "tests/tasks/test_papillon.py::test_the_papers_rows_in_file_order",
    "task.search_agent em_needs_format": "tests/tasks/test_search_agent.py::test_reward_options",
    "task.environment environment_python": f"{OPENENV}::test_openenvs_own_example_is_played",
    "task.environment step_rewards": f"{OPENENV}::test_each_steps_reward_may_be_its_turns",
    "task.environment tools_shared": f"{MCP}::test_one_session_may_be_all_rollouts",
    "task.environment once": f"{MCP}::test_settings_by_which_nothing_can_be_played_again",
    "task.environment tool_errors": "tests/tasks/environments/test_classes.py::"
    "test_errors_of_tools_may_fail_the_rollout",
    "task.environment max_turns": "tests/tasks/environments/test_classes.py::test_the_last_turn_acts_still",
    "task.environment max_observation": "tests/tasks/environments/test_classes.py::"
    "test_long_observations_are_cut_with_a_mark",
    # handed on as a whole
    "engine.openai endpoint.*": "tests/engines/test_endpoint.py::test_the_engines_endpoint_has_all_its_settings",
}
"""Leaves that no run here reads -> the test that shows what they do."""

OF_TRAIN, OF_POLICY, ALONE = "it is an option of mmrl train", "policy= names the weights", "one process"
NO_WEIGHTS = "trains no weights"
REFUSED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "eval": {
        "model.name": ("model.name=x", OF_POLICY),
        "model.lora": ("model.lora={}", OF_POLICY),
        "model.lora.*": ("model.lora.r=4", OF_POLICY),
        "model.modules": ("model.modules={}", "a checkpoint says which"),
        "model.modules.*": ("model.modules.rewriter.lr=0.5", "a checkpoint says which"),
        "model.gradient_checkpointing": ("model.gradient_checkpointing=true", OF_TRAIN),
        "hardware.processes": ("hardware.processes=2", "mmrl eval runs in one"),
        "hardware.nodes": ("hardware.nodes=2", "mmrl eval runs in one"),
        "hardware.rollout_devices": ("hardware.rollout_devices=1", OF_TRAIN),
        "hardware.sharding": ("hardware.sharding=fsdp2", OF_TRAIN),
        "hardware.cpu_offload": ("hardware.cpu_offload=true", OF_TRAIN),
        "hardware.ray": ("hardware.ray={}", ALONE),
        "hardware.ray.*": ("hardware.ray.max_failures=1", ALONE),
        "eval.split": ("eval.split=test", "use split="),
        "eval.every": ("eval.every=3", OF_TRAIN),
        "run.name": ("run.name=x", OF_TRAIN),
        "run.report_to": ("run.report_to=[tensorboard]", OF_TRAIN),
        "run.report_calls": ("run.report_calls=3", OF_TRAIN),
        "run.wandb_project": ("run.wandb_project=x", OF_TRAIN),
        "run.group": ("run.group=x", OF_TRAIN),
        "run.tags": ("run.tags=[x]", OF_TRAIN),
        "run.progress": ("run.progress=true", OF_TRAIN),
        "run.before": ("run.before=x", OF_TRAIN),
        "run.doctor": ("run.doctor=true", OF_TRAIN),
    },
    "prompts": {
        "model.lora.*": ("model.lora.r=4", NO_WEIGHTS),
        "model.modules": ("model.modules={}", NO_WEIGHTS),
        "model.modules.*": ("model.modules.m.lr=0.5", NO_WEIGHTS),
        "model.gradient_checkpointing": ("model.gradient_checkpointing=true", NO_WEIGHTS),
        "hardware.processes": ("hardware.processes=2", ALONE),
        "hardware.nodes": ("hardware.nodes=2", ALONE),
        "hardware.sharding": ("hardware.sharding=fsdp2", ALONE),
        "hardware.cpu_offload": ("hardware.cpu_offload=true", ALONE),
        "hardware.ray": ("hardware.ray={}", ALONE),
        "hardware.ray.*": ("hardware.ray.max_failures=1", ALONE),
        "eval.every": ("eval.every=3", NO_WEIGHTS),
        "run.doctor": ("run.doctor=true", NO_WEIGHTS),
    },
    "sft": {
        "hardware.processes": ("hardware.processes=2", "trains in one"),
        "hardware.nodes": ("hardware.nodes=2", "trains in one"),
        "hardware.rollout_devices": ("hardware.rollout_devices=1", "without vllm_server"),
        "hardware.sharding": ("hardware.sharding=fsdp2", ALONE),
        "hardware.cpu_offload": ("hardware.cpu_offload=true", "hardware.sharding=none"),
        "hardware.ray": ("hardware.ray={}", ALONE),
        "hardware.ray.*": ("hardware.ray.max_failures=1", ALONE),
        "run.doctor": ("run.doctor=true", "checked before a model loads"),
        "train.staleness": ("train.staleness=1", "no old policy"),
    },
}
"""Command -> leaves that no run of it reads -> a word that is refused for it, and a part of the sentence."""


def leaves(section: str, schema: type[BaseModel], prefix: str = "") -> Iterator[Leaf]:
    """All that can be set in a section; the sections that are chosen by a name are listed apart."""
    for key, field in schema.model_fields.items():
        yield f"{section} {prefix}{key}", (schema, key)
        if key not in ("task", "algo", "engine", "retriever"):
            for below in sections_of(field.annotation):
                yield from leaves(section, below, f"{prefix}{key}.")


def run(words: str, folder: Path, places: Mapping[str, str]) -> set[Key]:
    """Run a command in this process; the keys that it reads."""
    command, *typed = re.split(r" (?=[a-z_.]+=)", words)
    for name, place in places.items():
        typed = [word.replace(name, place) for word in typed]
    typed = later_wins([*SMALL, *(STEP if command in ("rl", "sft") else ()), *typed, f"run.dir={folder}"])
    line = read_line(typed, command_keys=("from",))
    checked: Any = Checked((eval_configs if command == "eval" else train_configs)(line)[0])
    build._TASKS.clear()  # a task is built once for equal sections
    with reads() as seen:
        assert evaluate_policy(checked) if command == "eval" else begin(checked)[1] == 0
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[Key]]:
    """The keys that runs of each command read."""
    folder, tiny, found = tmp_path_factory.mktemp("reads"), ModelConfig(name="tiny", path="tiny"), defaultdict(set)
    prompt = render_prompt(load_tokenizer(tiny), [{"role": "user", "content": PROBE}])
    # With train.lr=0 the weights stay, so that the stand-in for vLLM can answer the probe.
    vllm = fake_vllm(folder, 2048, probe_logprobs(load_model(tiny, "cpu"), prompt, None))
    with serving([chat_reply("7")]) as (server, _), listening(good_app()) as retriever:
        places = {"FIRST": str(folder / "0"), "VLLM": vllm, "SERVER": server, "RETRIEVER": retriever}
        places["BERT"] = str(tiny_bert(folder / "bert"))
        for number, words in enumerate(RUNS):
            found[words.split()[0]] |= run(words, folder / str(number), places)
    return found


@pytest.mark.slow  # two minutes of runs
def test_every_key_is_read_or_on_a_list(seen: Mapping[str, set[Key]]) -> None:
    anywhere = set[Key]().union(*seen.values())
    unread = {leaf for name, schema in COMMANDS.items() for leaf, key in leaves(name, schema) if key not in seen[name]}
    unread |= {leaf for name, schema in CHOSEN.items() for leaf, key in leaves(name, schema) if key not in anywhere}
    listed = [*HELD, *(f"{command} {key}" for command, keys in REFUSED.items() for key in keys)]
    assert {leaf for leaf in unread if not any(fnmatchcase(leaf, entry) for entry in listed)} == set()
    assert {entry for entry in listed if not any(fnmatchcase(leaf, entry) for leaf in unread)} == set(), "read by now"


@pytest.mark.parametrize("test", sorted(set(HELD.values())))
def test_what_holds_a_key_that_is_not_read_here_is_there(test: str) -> None:
    file, name = test.split("::")
    assert f"\ndef {name}(" in (TOP / file).read_text(encoding="utf-8")


BASES = {"eval": ["policy=tiny"], "prompts": ["algo=miprov2", "task=banking77"], "sft": ["algo=sft", "task=banking77"]}


@pytest.mark.parametrize(
    ("command", "word", "says"),
    [(command, word, says) for command, words in REFUSED.items() for word, says in words.values()],
)
def test_a_key_that_no_run_of_a_command_reads_is_refused_where_it_is_typed(command: str, word: str, says: str) -> None:
    found = refused(*BASES[command], word, command="eval" if command == "eval" else "train")
    section = word.partition(".")[0].partition("=")[0]
    assert [problem for problem in found if problem.startswith(section) and says in problem], found


class Wider(TrainConfig):
    """A section with a key that nobody reads."""

    unheard: int = 1


def test_the_tracker_finds_a_key_that_is_accepted_and_never_read(tmp_path: Path) -> None:
    config: Any = configured([*SMALL, *STEP, "algo=grpo", "task=qa_direct", f"run.dir={tmp_path / 'run'}"])
    config = config.model_copy(update={"train": Wider.model_validate({**dict(config.train), "unheard": 2})})
    with reads() as seen:
        (checked,) = check_all([config])
        assert (Wider, "staleness") not in seen, "a check is no effect"
        copy = Wider.model_validate(config.train.model_dump())
        assert copy == config.train and repr(copy) and hash(copy) and copy.model_dump_json()
        assert copy.unheard == config.train.unheard == 2, "and so is a test's own look"
        assert not seen
        with_model(OpenAIConfig(), "m")
        assert seen == {(OpenAIConfig, "endpoint")}, "validators of what mmrl makes of it read the other keys"
        assert begin(checked)[1] == 0
    assert [key for _, (kind, key) in leaves("rl", Wider) if (kind, key) not in seen] == ["unheard"]
