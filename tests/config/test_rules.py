"""What the user typed and has no effect is refused, with what to use instead; what has one is not."""

import pytest

from mmrl.cli.configs import eval_configs, train_configs
from mmrl.cli.overrides import read_line
from mmrl.config.engines import VllmServerConfig
from mmrl.config.rules import RUNS, TYPED
from mmrl.errors import ConfigError
from mmrl.run import check as prepare


def refused(*arguments, command="train"):
    line = read_line(arguments)
    try:
        prepare.check_all(train_configs(line) if command == "train" else eval_configs(line), line.keys)
    except ConfigError as error:
        return error.problems
    return []


AGENT, FOF, RR = "task=search_agent", "algo=mhgpo_fof", "algo=mhgpo_rr"
CASES = [
    (["eval.top_p=0.9"], "eval.top_p: got 0.9", "set eval.temperature", ["eval.temperature=0.6"]),
    (["eval.top_k=20"], "eval.top_k: got 20", "set eval.temperature", ["eval.temperature=0.6"]),
    (["eval.samples=4"], "eval.samples: got 4", "set eval.temperature", ["eval.temperature=0.6"]),
    (["eval.parse_retries=1"], "eval.parse_retries: got 1", "fails to parse", None),
    (
        [AGENT, "algo=ppo", "task.search_penalty=0.0"],
        "task.search_penalty: got 0.0",
        "task.reward=turn",
        ["algo=mt_ppo"],
    ),
    (
        [AGENT, "algo=grpo", "task.final_penalty=0.0"],
        "task.final_penalty: got 0.0",
        "task.reward=turn",
        ["algo=grpo_mr"],
    ),
    (
        [AGENT, "algo=grpo", "task.em_needs_format=false"],
        "task.em_needs_format: got false",
        "turn",
        ["task.reward=turn"],
    ),
    (["task.max_turns=4"], "task.max_turns: got 4", "it is an option of search_agent", [AGENT, "algo=grpo"]),
    (["hardware.engine=transformers", "engine=transformers"], "hardware.engine: got", "leave one", ["engine=auto"]),
    (["run.report_calls=3"], "run.report_calls: got 3", "run.report_to", ["run.report_to=[tensorboard]"]),
    (["run.group=x"], "run.group: got x", "run.report_to", ["run.report_to=[wandb]"]),
    (["run.tags=[x]"], "run.tags: ", "run.report_to", ["run.report_to=[wandb]"]),
    (["run.wandb_project=x"], "run.wandb_project: got x", "run.report_to", ["run.report_to=[wandb]"]),
    (["algo.clip=0.3", "algo.ratio_one=true"], "algo.clip: got 0.3", "ratio_one", ["algo.ratio_one=false"]),
    (["algo.parse_retries=2"], "algo.parse_retries: got 2", "fails to parse", None),
    ([AGENT, "algo=mappo", "algo.penalties=false"], "algo.penalties: got false", "no penalties", ["task=hotpotqa"]),
    ([AGENT, FOF, "algo.propagate=full"], "algo.propagate: got full", "no penalties", ["task=hotpotqa"]),
    (
        [FOF, "algo.propagate=full", "algo.penalties=false"],
        "algo.propagate: got full",
        "leave one",
        ["algo.penalties=true"],
    ),
    ([FOF, "algo.aggregate=max"], "algo.aggregate: got max", "no trained call", [RR]),
    (["algo=mhgpo_is", "algo.aggregate=min"], "algo.aggregate: got min", "no trained call", ["algo=mhgpo_fof_os"]),
    (["algo=ppo", "algo.obs=all"], "algo.obs: got all", "no observations", [AGENT]),
    (["algo=mmgrpo", "algo.failing_traces=trajectory"], "algo.failing_traces: got trajectory", "fails to parse", None),
    (["algo=grpo", "algo.eps=0.1", "algo.scale=false"], "algo.eps: got 0.1", "algo.scale=false", ["algo.scale=true"]),
    (["algo=ppo", "algo.kl=loss"], "algo.kl: got loss", "set algo.beta", ["algo.beta=0.01"]),
    (
        ["algo=ppo", "algo.critic_warmup_steps=5", "algo.critic_lr_factor=0"],
        "algo.critic_warmup_steps: got 5",
        "not trained",
        ["algo.critic_lr_factor=2"],
    ),
    (
        ["algo=mappo", "algo.epochs=2", "algo.value_clip=0.3", "algo.critic_lr_factor=0"],
        "algo.value_clip: got 0.3",
        "not trained",
        ["algo.critic_lr_factor=2"],
    ),
    ([RR, AGENT, "algo.aggregate=max"], "algo.aggregate: got max", "several successors", ["task=hotpotqa"]),
    ([RR, AGENT, "algo.fork_probs=[1.0]"], "algo.fork_probs: got", "one module", None),
    ([AGENT, "algo=mmgrpo", "algo.on_missing=skip_example"], "algo.on_missing: got", "one module", ["task=hotpotqa"]),
    (
        [RR, "algo.train_modules=[reranker]", "algo.freeze_modules=[answerer]"],
        "algo.freeze_modules: got answerer",
        "leaves it out already",
        ["algo.train_modules=[reranker,answerer]"],
    ),
    (["algo=mappo", "algo.value_clip=0.3"], "algo.value_clip: got 0.3", "one optimizer step", ["algo.epochs=2"]),
    (
        [RR, "algo.clip=0.3", "train.old_logprobs=recompute"],
        "algo.clip: got 0.3",
        "whose ratio is 1",
        ["algo.minibatches=2"],
    ),
    (
        [RR, "algo.clip_high=0.3", "train.old_logprobs=recompute"],
        "algo.clip_high: got 0.3",
        "whose ratio is 1",
        ["train.old_logprobs=sampler"],
    ),
    (
        ["train.schedule=constant_with_warmup"],
        "train.schedule: got constant_with_warmup",
        "set train.warmup_steps",
        ["train.warmup_steps=2"],
    ),
    ([AGENT, "algo=grpo", "task.dataset=nq"], "task.dataset: got nq", "on the mini world", ["task=r1_searcher"]),
    (["task=hover", "algo=mmgrpo", "task.sample=all"], "task.sample: got all", "on the mini world", None),
    (["algo=mmgrpo", "algo.filler=max"], "algo.filler: got max", "at most once", ["task=hover"]),
    (["algo=mmgrpo", "algo.fill_source=group"], "algo.fill_source: got group", "at most once", ["task=hover"]),
    (["algo=mmgrpo", "algo.padding_mode=truncate"], "algo.padding_mode: got truncate", "at most once", ["task=hover"]),
    (
        ["task=banking77", "algo=mmgrpo", "algo.failing_traces=trajectory"],
        "algo.failing_traces: got trajectory",
        "one call",
        ["task=hover"],
    ),
    (
        ["task=qa_direct", "algo=mmgrpo", "algo.overlong=trajectory"],
        "algo.overlong: got trajectory",
        "one call",
        ["task=search_agent"],
    ),
    (
        ["task=papillon", "algo=mmgrpo", "algo.padding_mode=ragged", "algo.failing_index=true"],
        "algo.failing_index: got true",
        "at most once",
        ["task=hover"],
    ),
    (
        [RR, "algo.freeze_modules=[reranker]", "algo.advantage_scale={reranker: 2.0}"],
        "algo.advantage_scale.reranker: got 2.0",
        "not trained",
        ["algo.freeze_modules=[answerer]"],
    ),
]


@pytest.mark.parametrize(("arguments", "starts", "says", "cure"), CASES, ids=lambda value: str(value)[:40])
def test_typed_keys_without_effect_are_refused_and_the_cure_works(arguments, starts, says, cure):
    found = [problem for problem in refused(*arguments) if problem.startswith(starts)]
    assert len(found) == 1 and says in found[0] and "no effect" in found[0]
    if cure is not None:
        changed = {argument.partition("=")[0] for argument in cure}
        kept = [argument for argument in arguments if argument.partition("=")[0] not in changed]
        assert refused(*kept, *cure) == []


ALWAYS = [
    (["algo=grpo", "algo.loss_length=4"], "algo.loss_length", "got 4", "loss_mean=seq"),
    (["algo=grpo", "algo.refill_rounds=2"], "algo.refill_rounds", "got 2", "zero_variance=keep"),
    (["algo=grpo", "algo.scale=false", "algo.std_over=batch"], "algo.std_over", "got batch", "scale=false"),
    ([FOF, "algo.penalties=false", "algo.penalty_scale={answerer: 2.0}"], "algo.penalty_scale", "has", "penalties"),
    (["algo=mmgrpo", "algo.fill_source=group", "algo.filler=max"], "algo.filler", "got max", "fill_source=group"),
    (["algo=mmgrpo", "algo.padding_mode=ragged", "algo.filler=max"], "algo.filler", "got max", "padding_mode=ragged"),
    (["algo=mmgrpo", "algo.padding_mode=ragged", "algo.fill_source=group"], "algo.fill_source", "got group", "ragged"),
    (["algo=mmgrpo", "algo.failing_index=true"], "algo.failing_index", "got true", "padding_mode=fill"),
    (["algo=mmgrpo", "algo.overlong=trajectory", "algo.max_context=null"], "algo.overlong", "got traj", "=null"),
    ([AGENT, "algo=ppo", "algo.position=turn_end"], "algo.position", "got turn_end", "needs obs=all"),
    ([AGENT, "algo=ppo", "algo.whiten=all"], "algo.whiten", "got all", "needs obs=all"),
    (["task.retriever.retries=9"], "task.retriever.retries", "got 9", "option of remote"),
    (["task.retriever.index=x", "task.retriever.k1=2.0"], "task.retriever.k1", "got 2.0", "built with its own"),
    (["train.warmup_steps=3", "train.schedule=constant"], "train.warmup_steps", "got 3", "constant_with_warmup"),
    (["algo.ratio_one=true", "train.old_logprobs=recompute"], "train.old_logprobs", "got recompute", "ratio_one"),
    (["algo.ratio_one=true", "algo.clip_high=0.3"], "algo.clip_high", "got 0.3", "ratio_one"),
    (["algo.ratio_one=true", "algo.loss=cispo"], "algo.loss", "got cispo", "ratio_one"),
    (["algo=mt_ppo", "algo.whiten_within=turn", "algo.whiten=none"], "algo.whiten_within", "got turn", "whiten=none"),
    (["algo=mhgpo_fof", "algo.frozen_serving=true", "model.modules={}"], "algo.frozen_serving", "got true", "adapter"),
    (["hardware.device=cuda", "hardware.sharding=fsdp2"], "hardware.sharding", "got fsdp2", "one process"),
    (["hardware.cpu_offload=true"], "hardware.cpu_offload", "got true", "hardware.sharding=none"),
    (["hardware.rollout_devices=1"], "hardware.rollout_devices", "got 1", "vllm_server"),
]


@pytest.mark.parametrize(("arguments", "key", "got", "says"), ALWAYS, ids=lambda value: str(value)[:40])
def test_values_that_another_one_switches_off_are_refused_whoever_set_them(arguments, key, got, says):
    problems = [text for text in refused(*arguments) if text.startswith(f"{key}: {got}") and "no effect" in text]
    assert len(problems) == 1 and says in problems[0]


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
    tested = {case[1].partition(":")[0] for case in CASES} | {case[1] for case in ALWAYS}
    others = {"algo.ddof", "engine.endpoints", "model.modules"}  # the latter two: test_endpoint.py, test_run_modules.py
    others |= {"eval.split", "eval.every", "model.lora"}  # below
    others |= {f"engine.{key}" for key in VllmServerConfig.model_fields}  # each tested in test_engine.py
    others |= {f"algo.{key}" for key in ("format_failure_score", "format_failure_best")}
    others |= {"model.path", "model.name", "model.gradient_checkpointing"}  # above; effects/command.py
    others |= {f"task.data.{split}_items" for split in ("train", "dev", "test")}  # tests/run/test_other_models.py
    others |= {f"run.{key}" for key in ("name", "report_to", "progress", "doctor")}
    others |= {"task.caught_parse_penalty"}  # below
    others |= {"eval.temperature", "task.max_tokens"}  # test_settings_that_an_endpoint_is_not_sent
    others |= {f"train.{key}" for key in ("packing", "tis", "staleness", "max_failed_share")}
    others |= {"engine", "algo.critic"}  # the latter: tests/run/test_run_modules.py
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
    assert refused(AGENT, f"algo={algo}") == []
    (problem,) = refused(AGENT, f"algo={algo}", "task.reward=outcom")
    assert problem.startswith("task.reward: got 'outcom', expected one of")


def test_reward_set_of_a_task_with_a_judge_alone():
    class Judged:
        reward_sets = ("outcome", "judge_turn")

    assert prepare.reward_set(Judged(), None, "mt_ppo") == "judge_turn"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["algo=grpo", "algo.ddof=true"], "algo.ddof: got True, expected a whole number"),
        (["algo=grpo", "algo.ddof=1.0"], "algo.ddof: got 1.0, expected a whole number"),
        (["algo=grpo", "algo.ddof=2"], "algo.ddof: got 2, expected 0 or 1"),
        (
            ["task=tool_agent", "algo=grpo", "task.outcome_rewards=4.0"],
            "task.outcome_rewards: got 4.0, expected a whole",
        ),
        (["algo=mmgrpo", "algo.failing_index=false"], "algo.failing_index: got False, expected 'zero' or 'true'"),
        (
            ["algo=mmgrpo", "algo.format_failure_score=1e200"],
            "algo.format_failure_score: got 1e+200, expected less than",
        ),
        (["algo=mmgrpo", "algo.rollouts=100001"], "algo.rollouts: got 100001, expected less than"),
        (["algo=grpo", "algo.loss_mean=constant", f"algo.loss_length={10**400}"], "algo.loss_length: got 1000"),
        ([FOF, "algo.penalty_scale={answerer: 1e300}"], "algo.penalty_scale.answerer: got 1e+300, expected a finite"),
    ],
)
def test_values_that_python_or_arithmetic_would_confuse(arguments, problem):
    assert [found for found in refused(*arguments) if found.startswith(problem)]


def test_a_penalty_that_is_passed_on_has_an_effect_where_its_module_is_frozen():
    arguments = ["algo.freeze_modules=[reranker]", "algo.propagate=full", "algo.penalty_scale={reranker: 2.0}"]
    assert refused(RR, *arguments) == []


def test_the_word_true_may_be_typed_as_it_is():
    arguments = ["algo=mmgrpo", "task=hover", "algo.padding_mode=ragged", "algo.failing_index=true"]
    (config,) = train_configs(read_line(arguments))
    assert config.algo.failing_index == "true" and refused(*arguments) == []
