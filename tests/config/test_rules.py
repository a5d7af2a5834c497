"""What the user typed and has no effect is refused, with what to use instead; what has one is not."""

from typing import Any

import pytest

from mmrl.cli.configs import configured
from mmrl.config.engines import VllmServerConfig
from mmrl.config.rules import RUNS, TYPED
from mmrl.run.build import reward_set
from tests.helpers import Fake
from tests.helpers.lines import refused

AGENT, FOF, RR = "task=search_agent", "algo=mhgpo_fof", "algo=mhgpo_rr"
CASES: list[Any] = [
    ("eval.top_p=0.9", [], "set eval.temperature", ["eval.temperature=0.6"]),
    ("eval.top_k=20", [], "set eval.temperature", ["eval.temperature=0.6"]),
    ("eval.samples=4", [], "set eval.temperature", ["eval.temperature=0.6"]),
    ("eval.parse_retries=1", [], "fails to parse", None),
    ("task.search_penalty=0.0", [AGENT, "algo=ppo"], "task.reward=turn", ["algo=mt_ppo"]),
    ("task.final_penalty=0.0", [AGENT, "algo=grpo"], "task.reward=turn", ["algo=grpo_mr"]),
    ("task.em_needs_format=false", [AGENT, "algo=grpo"], "turn", ["task.reward=turn"]),
    (
        "task.privileged=mean",
        [AGENT, "algo=igpo", "algo.privileged={agent: answers}", "algo.distill={agent: policy}"],
        "use task.reward=privileged",
        ["task.reward=privileged"],
    ),
    ("task.gain=logprob", [AGENT, "algo=grpo"], "use task.reward=gain", ["algo=igpo"]),
    ("task.max_turns=4", [], "it is an option of search_agent", [AGENT, "algo=grpo"]),
    ("hardware.engine=transformers", ["engine=transformers"], "leave one", ["engine=auto"]),
    ("run.report_calls=3", [], "run.report_to", ["run.report_to=[tensorboard]"]),
    ("run.group=x", [], "run.report_to", ["run.report_to=[wandb]"]),
    ("run.tags=[x]", [], "run.report_to", ["run.report_to=[wandb]"]),
    ("run.wandb_project=x", [], "run.report_to", ["run.report_to=[wandb]"]),
    ("algo.clip=0.3", ["algo.ratio_one=true"], "ratio_one", ["algo.ratio_one=false"]),
    (
        "algo.ratio_one=true",
        [AGENT, "algo=distill", "algo.distill={agent: initial}", "algo.distill_kl=exact"],
        "no sampled tokens",
        ["algo.distill_kl=sampled"],
    ),
    (
        "algo.clip=0.3",
        [RR, "algo.minibatches=2", "algo.loss=cispo", "algo.clip_high=4"],
        "whose one bound",
        ["algo.clip_high=null"],
    ),
    ("algo.parse_retries=2", [], "fails to parse", None),
    ("algo.penalties=false", [AGENT, "algo=mappo"], "no penalties", ["task=hotpotqa"]),
    ("algo.propagate=full", [AGENT, FOF], "no penalties", ["task=hotpotqa"]),
    ("algo.propagate=full", [FOF, "algo.penalties=false"], "leave one", ["algo.penalties=true"]),
    ("algo.aggregate=max", [FOF], "no trained call", [RR]),
    ("algo.aggregate=min", ["algo=mhgpo_is"], "no trained call", ["algo=mhgpo_fof_os"]),
    ("algo.obs=all", ["algo=ppo"], "no observations", [AGENT]),
    ("algo.failing_traces=trajectory", ["algo=mmgrpo"], "fails to parse", None),
    ("algo.eps=0.1", ["algo=grpo", "algo.scale=false"], "algo.scale=false", ["algo.scale=true"]),
    ("algo.kl=loss", ["algo=ppo"], "set algo.beta", ["algo.beta=0.01"]),
    ("algo.critic_warmup_steps=5", ["algo=ppo", "algo.critic_lr_factor=0"], "not trained", ["algo.critic_lr_factor=2"]),
    (
        "algo.value_clip=0.3",
        ["algo=mappo", "algo.epochs=2", "algo.critic_lr_factor=0"],
        "not trained",
        ["algo.critic_lr_factor=2"],
    ),
    ("algo.aggregate=max", [RR, AGENT], "several successors", ["task=hotpotqa"]),
    ("algo.fork_probs=[1.0]", [RR, AGENT], "one module", None),
    ("algo.fanout={rewriter\\:1:2}", ["algo=c3"], "calls each at most once", [AGENT, "algo.fanout={agent\\:1:2}"]),
    ("algo.siblings=depth", ["algo=c3", "task=qa_direct"], "one call", [AGENT]),
    ("algo.on_missing=skip_example", [AGENT, "algo=mmgrpo"], "one module", ["task=hotpotqa"]),
    ("algo.value_clip=0.3", ["algo=mappo"], "one optimizer step", ["algo.epochs=2"]),
    ("algo.clip=0.3", [RR, "train.old_logprobs=recompute"], "whose ratio is 1", ["algo.minibatches=2"]),
    ("algo.clip_high=0.3", [RR, "train.old_logprobs=recompute"], "whose ratio is 1", ["train.old_logprobs=sampler"]),
    ("train.schedule=constant_with_warmup", [], "set train.warmup_steps", ["train.warmup_steps=2"]),
    ("task.dataset=nq", [AGENT, "algo=grpo"], "on the mini world", ["task=r1_searcher"]),
    ("task.sample=paper", ["task=hover", "algo=mmgrpo"], "on the mini world", None),
    ("task.claim_hops=4", ["task=hover", "algo=mmgrpo"], "whose claims have 3 hops", None),
    ("algo.filler=max", ["algo=mmgrpo"], "at most once", ["task=hover"]),
    ("algo.fill_source=group", ["algo=mmgrpo"], "at most once", ["task=hover"]),
    ("algo.padding_mode=truncate", ["algo=mmgrpo"], "at most once", ["task=hover"]),
    ("algo.failing_traces=trajectory", ["task=banking77", "algo=mmgrpo"], "one call", ["task=hover"]),
    ("algo.overlong=trajectory", ["task=qa_direct", "algo=mmgrpo"], "one call", [AGENT]),
    (
        "algo.failing_index=true",
        ["task=papillon", "algo=mmgrpo", "algo.padding_mode=ragged"],
        "at most once",
        ["task=hover"],
    ),
]


# Whoever set them: a value that another one switches off.
ALWAYS = [
    ("algo.penalty_scale={answerer: 2.0}", [FOF, "algo.penalties=false"], "penalties"),
    ("algo.loss_length=4", ["algo=grpo"], "loss_mean=seq"),
    ("algo.refill_rounds=2", ["algo=grpo"], "zero_variance=keep"),
    ("algo.std_over=batch", ["algo=grpo", "algo.scale=false"], "scale=false"),
    ("algo.filler=max", ["algo=mmgrpo", "algo.fill_source=group"], "fill_source=group"),
    ("algo.filler=max", ["algo=mmgrpo", "algo.padding_mode=ragged"], "padding_mode=ragged"),
    ("algo.fill_source=group", ["algo=mmgrpo", "algo.padding_mode=ragged"], "ragged"),
    ("algo.failing_index=true", ["algo=mmgrpo"], "padding_mode=fill"),
    ("algo.overlong=trajectory", ["algo=mmgrpo", "algo.max_context=null"], "=null"),
    ("algo.position=turn_end", [AGENT, "algo=ppo"], "needs obs=all"),
    ("algo.whiten=all", [AGENT, "algo=ppo"], "needs obs=all"),
    ("task.retriever.retries=9", [], "option of remote"),
    ("task.retriever.k1=2.0", ["task.retriever.index=x"], "built with its own"),
    ("train.warmup_steps=3", ["train.schedule=constant"], "constant_with_warmup"),
    ("train.old_logprobs=recompute", ["algo.ratio_one=true"], "ratio_one"),
    ("algo.clip_high=0.3", ["algo.ratio_one=true"], "ratio_one"),
    ("algo.loss=cispo", ["algo.ratio_one=true"], "ratio_one"),
    ("algo.whiten_within=turn", ["algo=mt_ppo", "algo.whiten=none"], "whiten=none"),
    ("algo.frozen_serving=true", [FOF, "model.modules={}"], "adapter"),
    ("hardware.sharding=fsdp2", ["hardware.device=cuda"], "one process"),
    ("hardware.cpu_offload=true", [], "hardware.sharding=none"),
    ("hardware.rollout_devices=1", [], "vllm_server"),
]


def sentence(word):
    """How the refusal of a typed key begins."""
    key, _, value = word.partition("=")
    return f"{key}: {'' if value.startswith('{') else f'got {value}, which '}has no effect"


@pytest.mark.parametrize(
    ("word", "beside", "says", "cure"),
    [*CASES, *((*case, None) for case in ALWAYS)],
    ids=lambda value: str(value)[:40],
)
def test_keys_without_effect_are_refused_and_the_cure_works(word, beside, says, cure):
    (problem,) = [problem for problem in refused(word, *beside) if problem.startswith(sentence(word))]
    assert says in problem
    if cure is not None:
        changed = {argument.partition("=")[0] for argument in cure}
        assert refused(*(words for words in [word, *beside] if words.partition("=")[0] not in changed), *cure) == []


OF_MODULES = [
    ("train_modules=[reranker]", "freeze_modules=[answerer]", "freeze_modules: got answerer", "train_modules=null"),
    (
        "freeze_modules=[reranker]",
        "advantage_scale={reranker: 2.0}",
        "advantage_scale.reranker: got 2.0",
        "freeze_modules=[answerer]",
    ),
]


@pytest.mark.parametrize(("trained", "idle", "starts", "cure"), OF_MODULES)
def test_settings_of_modules_that_are_not_trained_are_refused(trained, idle, starts, cure):
    (problem,) = refused(RR, f"algo.{trained}", f"algo.{idle}")
    assert problem.startswith(f"algo.{starts}") and "no effect" in problem
    assert refused(RR, f"algo.{cure}", f"algo.{idle}") == []


def test_an_evaluation_may_take_the_hardware_of_a_training_run(tmp_path, monkeypatch):
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    profile = "name: mine\nsharding: fsdp2\nrollout_devices: 1\ncpu_offload: true\n"
    (tmp_path / "conf" / "hardware" / "mine.yaml").write_text(profile)
    monkeypatch.chdir(tmp_path)
    assert refused("policy=tiny", "hardware=mine", command="eval") == []


@pytest.mark.parametrize("key", ["eval.temperature=0.5", "eval.top_p=0.9", "task.max_tokens=9"])
def test_settings_that_an_endpoint_is_not_sent(key, monkeypatch):
    monkeypatch.setattr("mmrl.engines.openai.OpenAIChat.unreachable", lambda chat: [])
    setting = key.partition("=")[0].partition(".")[2]
    words = dict.fromkeys(["policy=big", "engine=openai", "engine.endpoint.key_env=null", "eval.temperature=0.5", key])
    (problem,) = refused(*words, f"engine.endpoint.omit=[{setting}]", command="eval")[-1:]
    assert problem.startswith(key.replace("=", ": got ")) and "engine.endpoint.omit" in problem
    assert refused(*words, "engine.endpoint.omit=[seed]", command="eval") == []


def test_samples_differ_where_the_endpoint_has_a_temperature_of_its_own(monkeypatch):
    monkeypatch.setattr("mmrl.engines.openai.OpenAIChat.unreachable", lambda chat: [])
    words = ["policy=big", "engine=openai", "engine.endpoint.key_env=null", "eval.samples=2"]
    assert refused(*words, "engine.endpoint.omit=[temperature]", command="eval") == []
    assert refused(*words, command="eval")


def test_sections_name_all_their_keys_without_effect_at_once():
    problems = refused("algo=mmgrpo", "algo.loss_length=4", "algo.overlong=trajectory", "algo.max_context=null")
    assert [text.partition(":")[0] for text in problems] == ["algo.loss_length", "algo.overlong"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([FOF], "algo.penalties: got true, which makes rewards negative, and algo.scale=mean divides by their mean"),
        (["algo=mmgrpo", "task=banking77"], "algo.format_failure_score: got -1.0, which makes rewards negative"),
        ([AGENT, "algo=grpo", "task.failure_score=-0.5"], "task.failure_score: got -0.5, which makes rewards negative"),
    ],
)
def test_a_mean_of_negative_rewards_is_refused(words, said):
    (problem,) = refused("algo.scale=mean", *words)
    assert problem.startswith(said)


def test_every_rule_has_a_case():
    tested = {case[0].partition("=")[0] for case in [*CASES, *ALWAYS]}
    others = {"algo.ddof", "engine.endpoints", "model.modules"}  # the latter two: test_endpoint.py, test_run_modules.py
    others |= {"eval.split", "eval.every", "model.lora"}  # below
    others |= {f"engine.{key}" for key in VllmServerConfig.model_fields}  # each tested in test_engine.py
    others |= {f"algo.{key}" for key in ("format_failure_score", "format_failure_best")}
    others |= {"model.path", "model.name", "model.gradient_checkpointing"}  # test_reads.py
    others |= {f"task.data.{split}_items" for split in ("train", "dev", "test")}  # tests/run/test_other_models.py
    others |= {f"run.{key}" for key in ("name", "report_to", "progress", "before", "doctor")}
    others |= {"hardware.ray", "hardware.processes", "hardware.nodes"}  # tests/run/test_processes.py, test_reads.py
    others |= {"task.caught_parse_penalty"}  # below
    others |= {"task.failure_score"}  # tests/stages/test_unscored.py
    others |= {"eval.temperature", "task.max_tokens"}  # test_settings_that_an_endpoint_is_not_sent
    others |= {f"train.{key}" for key in ("packing", "tis", "staleness", "max_failed_share")}
    others |= {"engine", "algo.critic"}  # the latter: tests/trainer/test_critic.py
    keys = {key for rule in (*RUNS, *TYPED) for key in rule.keys.split()}
    assert keys <= tested | others


@pytest.fixture
def resilient(tmp_path, monkeypatch):
    """Words for a program of one's own, which may catch what it likes."""
    (tmp_path / "resilient_program.py").write_text(
        "async def program(example, ctx):\n    return ''\n\n\ndef metric(record, prediction):\n    return 1.0\n"
    )
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "q"}\n' * 32)
    monkeypatch.syspath_prepend(tmp_path)
    data = [f"task.data.{split}={tmp_path / split}.jsonl" for split in ("train", "dev")]
    words = ["task=dspy", "task.program=resilient_program:program", "task.metric=resilient_program:metric"]
    return [*words, "task.inputs=[question]", "task.modules=[a]", *data]


def test_a_penalty_of_caught_parse_failures_needs_calls_with_penalties(resilient):
    penalty = "task.caught_parse_penalty=-0.5"
    got = "task.caught_parse_penalty: got -0.5, which has no effect "
    (problem,) = refused(*resilient, "algo=grpo", penalty)
    assert problem == (
        f"{got}with this algorithm, whose calls have no penalties; use algo=mappo or one of algo=mhgpo_*"
    )
    (problem,) = refused(*resilient, "algo=mappo", "algo.penalties=false", penalty)
    assert problem == f"{got}with algo.penalties=false; leave one of the two out"
    (problem,) = refused(*resilient, "policy=tiny", penalty, command="eval")
    assert problem == f"{got}on mmrl eval; it is an option of mmrl train"
    assert refused(*resilient, FOF, penalty) == []
    (problem,) = refused(*resilient, FOF, "task.caught_parse_penalty=0.5")
    assert problem.startswith("task.caught_parse_penalty: got 0.5, expected less than or equal to 0")


def test_with_it_options_about_penalties_have_an_effect(resilient):
    (problem,) = refused(*resilient, FOF, "algo.propagate=full")
    assert problem.endswith("which has no effect with this task: its modules have no penalties")
    assert refused(*resilient, FOF, "algo.propagate=full", "task.caught_parse_penalty=-0.5") == []


def test_what_a_file_says_is_not_judged():
    """`algo=ppo` brings kl=reward and critic_warmup_steps, `model=tiny` beta=0: nobody typed a key without effect."""
    assert refused("algo=ppo", AGENT) == []
    assert refused(FOF, "algo.aggregate=mean") != []


def test_an_evaluation_has_no_training_options():
    found = refused("policy=tiny", "eval.split=test", "eval.every=3", "model.lora.r=3", command="eval")
    assert found == [
        "eval.split: got test, which has no effect on mmrl eval; use split=",
        "model.lora.r: got 3, which has no effect on mmrl eval: policy= names the weights, and their adapter",
        "eval.every: got 3, which has no effect on mmrl eval; it is an option of mmrl train",
    ]
    (problem,) = refused("policy=tiny", AGENT, "task.search_penalty=0.2", command="eval")
    assert problem.startswith("task.search_penalty: got 0.2")
    assert refused("policy=tiny", AGENT, "task.search_penalty=0.2", "task.reward=turn", command="eval") == []


@pytest.mark.parametrize("algo", ["mt_ppo", "mt_grpo", "mt_grpo_variable", "grpo_mr"])
def test_turn_algorithms_need_a_reward_set_with_turn_rewards(algo):
    (problem,) = refused(AGENT, f"algo={algo}", "task.reward=outcome")
    assert problem == (
        f"task.reward: got outcome, which has no turn rewards, and algo={algo} needs them; "
        "use task.reward=turn, or leave it out"
    )
    (problem,) = refused(f"algo={algo}")
    assert problem.startswith(f"algo: {algo} needs a task with turn rewards, this one offers outcome; use algo=")
    assert "task=environment by `_turn_reward` in the class" in problem
    assert refused(AGENT, f"algo={algo}") == []
    (problem,) = refused(AGENT, f"algo={algo}", "task.reward=outcom")
    assert problem.startswith("task.reward: got 'outcom', expected one of")


def test_reward_set_of_a_task_with_a_judge_alone():
    class Judged(Fake):
        reward_sets = ("outcome", "judge_turn")

    assert reward_set(Judged(), None, "mt_ppo") == "judge_turn"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("algo=grpo algo.ddof=true", "algo.ddof: got True, expected a whole number"),
        ("algo=grpo algo.ddof=1.0", "algo.ddof: got 1.0, expected a whole number"),
        ("algo=grpo algo.ddof=2", "algo.ddof: got 2, expected 0 or 1"),
        ("task=tool_agent algo=grpo task.outcome_rewards=4.0", "task.outcome_rewards: got 4.0, expected a whole"),
        ("algo=mmgrpo algo.failing_index=false", "algo.failing_index: got False, expected 'zero' or 'true'"),
        ("algo=mmgrpo algo.format_failure_score=1e200", "algo.format_failure_score: got 1e+200, expected less than"),
        ("algo=mmgrpo algo.rollouts=100001", "algo.rollouts: got 100001, expected less than"),
        (f"algo=grpo algo.loss_mean=constant algo.loss_length={10**400}", "algo.loss_length: got 1000"),
        (f"{FOF} algo.penalty_scale={{answerer:1e300}}", "algo.penalty_scale.answerer: got 1e+300, expected a finite"),
    ],
)
def test_values_that_python_or_arithmetic_would_confuse(line, problem):
    assert [found for found in refused(*line.split()) if found.startswith(problem)]


def test_a_penalty_that_is_passed_on_has_an_effect_where_its_module_is_frozen():
    arguments = ["algo.freeze_modules=[reranker]", "algo.propagate=full", "algo.penalty_scale={reranker: 2.0}"]
    assert refused(RR, *arguments) == []


def test_the_word_true_may_be_typed_as_it_is():
    arguments = ["algo=mmgrpo", "task=hover", "algo.padding_mode=ragged", "algo.failing_index=true"]
    algo: Any = configured(arguments).algo
    assert algo.failing_index == "true" and refused(*arguments) == []
