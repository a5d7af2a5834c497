"""stages.sft: every refusal, in the words of the key or the line of the file, before a model loads."""

import pytest

from mmrl.config.rules import without_effect
from mmrl.errors import ConfigError, DataError, ToolFailure, TooManyFailures
from mmrl.models.template import use
from mmrl.stages.sft_data import read_examples, sft_problems
from tests.helpers.gateway import tokenizer
from tests.helpers.programs import Chain, FakeEngine, FakeTask, make_dspy, seeded_letter
from tests.helpers.stages import CHAT, LORA, MINE, OWN, Teachable, config_of, stage_of, train, written


def problems(options, task=None, frozen=()):
    return sft_problems(config_of(options), task or Teachable(Chain(("a", "b"))), frozen)


def test_nothing_to_train_on_is_one_sentence_before_a_model_loads(tmp_path):
    none = FakeTask(Chain(("a", "b")))
    assert problems({}, none) == [
        "algo.source: task=fake makes no demonstrations of its train examples; use algo.source=file algo.file=FILE, "
        "or algo.source=rollouts"
    ]
    assert problems({}) == [] and problems(OWN, none) == []
    assert (
        "makes no demonstrations of c" in problems({"algo.modules": {"c": 1.0}}, Teachable(Chain(("a", "b", "c"))))[0]
    )
    assert problems({"algo.modules": {"d": 1.0}}) == ["algo.modules: got 'd', expected one of a, b"]
    assert "out of the loss" in problems({"algo.modules": {"a": 1.0}}, frozen=("a",))[0]
    none.examples = lambda split: []
    assert problems(OWN, none)[0].startswith("task.data.train: there are no train examples")
    of_b = {**CHAT, "module": "b"}
    assert problems({**written(tmp_path / "b.jsonl", of_b), "algo.modules": {"a": 1.0}})[0].endswith("no examples of a")


def test_what_one_process_cannot_do_is_refused():
    assert problems({"hardware.processes": 2})[0].startswith("hardware: profile 'cpu' has several processes")
    assert problems({"model.dtype": "float16"})[0].startswith("model.dtype")
    assert problems({"train.warmup_steps": 4, "train.schedule": "cosine"})[0].startswith("train.warmup_steps: got 4")


SAID = {"role": "assistant", "content": "y"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([1], "got a list, expected a record"),
        ({"text": "x"}, "inputs: Field required; outputs: Field required; text: Extra inputs"),
        ({"inputs": {"text": "x"}}, "outputs: Field required"),
        ({**CHAT, "weight": 2}, "weight: Extra inputs are not permitted"),
        ({**CHAT, "module": "z"}, "module: got 'z', expected one of a, b"),
        ({"messages": [MINE]}, "messages: List should have at least 2 items"),
        ({"messages": [MINE, MINE]}, "the last one is the user's"),
        ({"messages": [{"role": "tool", "content": "x"}, MINE]}, "tools: Field required"),
        ({"messages": [MINE, {"role": "assistant", "tool_calls": [{}]}]}, "tools: Field required"),
        ({"messages": [{**MINE, "content": None}, MINE], "tools": [{}]}, "messages.0.content: Input should be a valid"),
        ({**CHAT, "tools": "look"}, "tools: got 'look', expected a list of functions, or its JSON text"),
        ({"messages": [{"role": "user", "content": [1]}, MINE]}, "messages.0.content: Input should be a valid string"),
        (
            {"messages": [MINE, {**SAID, "reasoning_content": "Hm."}]},
            "reasoning_content: of a chat without tools; put the thoughts into the content",
        ),
        (
            {"messages": [MINE, {**SAID, "weight": 0}]},
            r"weights \[None, 0\]; of a chat without tools the last reply alone",
        ),
        (
            {"messages": [MINE, {**SAID, "weight": 1}, MINE, SAID]},
            r"weights \[None, 1, None, None\]; of a chat",
        ),
        ({"messages": [{**MINE, "weight": 1}, SAID], "tools": [{}]}, "messages.0.weight: only a reply"),
        ({"messages": [MINE, {**SAID, "weight": 2}]}, "messages.1.weight: Input should be 0 or 1"),
        ({"messages": [MINE, {**SAID, "weight": 0}], "tools": [{}]}, "messages: every reply has weight 0"),
        ({"messages": [MINE, {**SAID, "prefix": True}], "tools": [{}]}, "messages.1.prefix: Extra inputs"),
        ({**CHAT, "tools": []}, "tools: List should have at least 1 item"),
        ({"messages": [MINE, MINE], "tools": [{}]}, "expected a prompt first, and the assistant's last"),
        (
            {"messages": [MINE, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "tools": [{}]},
            "function.arguments",
        ),
        ({"inputs": {}, "outputs": {}}, "module: missing, expected one of a, b"),
        ({"inputs": {}, "outputs": {}, "module": "a"}, "is no DSPy program"),
    ],
)
def test_records_that_are_none_are_named(tmp_path, record, says):
    options = written(tmp_path / "x.jsonl", CHAT, record)
    with pytest.raises(DataError, match=f"algo.file: .*x.jsonl line 2: .*{says}"):
        read_examples(config_of(options), Teachable(Chain(("a", "b"))))
    assert len(problems(options)) == 1


def test_thoughts_behind_prompts_that_close_them_are_refused(tmp_path):
    """Qwen 3 with model.thinking=false, the default: its prompts end with an empty block of thoughts."""
    said = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n3"}
    stage, _ = stage_of(tmp_path / "run", written(tmp_path / "x.jsonl", CHAT, {"messages": [MINE, said]}))
    stage.tokenizer = tokenizer("qwen3")
    use(stage.tokenizer, thinking=False, date=None)
    says = (
        "x.jsonl line 2: messages: prompts of the model's chat template close the thoughts, and the reply begins with "
        "<think>; use model.thinking=true, or replies without thoughts"
    )
    with pytest.raises(ConfigError, match=says):
        stage._demonstrated()
    stage.tokenizer = tokenizer("qwen3")
    use(stage.tokenizer, thinking=True, date=None)
    assert stage.tokenizer.decode(stage._demonstrated()[1][1].completion_ids[:-1]) == said["content"]


def test_fields_that_a_dspy_module_does_not_have_are_named(tmp_path):
    task = make_dspy("banking77")
    good = {"inputs": {"text": "x"}, "outputs": {"reasoning": "", "label": task.labels[0]}}
    bad = [
        {**good, "outputs": {"label": task.labels[0]}},
        {**good, "inputs": {"text": "x", "more": 1}},
        {**good, "outputs": {"reasoning": "", "label": "nothing"}},
    ]
    with pytest.raises(DataError) as refused:
        read_examples(config_of(written(tmp_path / "x.jsonl", good, *bad)), task)
    assert [problem.partition(".jsonl line ")[2][:40] for problem in refused.value.problems] == [
        "2: outputs: reasoning missing, expected ",
        "3: inputs: got 'more', expected one of t",
        "4: outputs: Failed to parse field label ",
    ]


def test_all_problems_of_a_file_are_listed_and_a_file_that_is_not_there_is_named(tmp_path):
    assert len(problems(written(tmp_path / "x.jsonl", *[{"x": 1}] * 9))) == 9
    assert "no such file" in problems({"algo.source": "file", "algo.file": str(tmp_path / "none.jsonl")})[0]


def test_weights_per_module_need_the_module_of_a_chat(tmp_path):
    options = {**written(tmp_path / "x.jsonl", CHAT), **LORA, "model.modules": {}}
    assert "module: missing" in problems(options)[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"algo.source": "file"}, "algo.file: missing"),
        ({"algo.file": "x.jsonl"}, "algo.file: got x.jsonl, which has no effect with source=task"),
        ({"algo.modules": {"a": 0.0}}, "algo.modules.a: got 0.0, expected a number above 0"),
    ],
)
def test_options_without_effect_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        config_of(options)


@pytest.mark.parametrize("key", ["old_logprobs", "tis", "staleness", "max_failed_share"])
def test_options_of_training_by_reinforcement_are_refused_where_they_are_typed(key):
    facts = "outcome"
    (problem,) = without_effect(config_of(), {f"train.{key}"}, facts)
    assert problem.startswith(f"train.{key}: got ")
    assert bool(without_effect(config_of(OWN), {f"train.{key}"}, facts)) == (key != "max_failed_share")
    assert without_effect(config_of({"engine.name": "vllm_server"}), {"engine"}, facts)[0].startswith(
        "engine: has no effect"
    )
    assert without_effect(config_of(), {"run.doctor"}, facts)[0].startswith("run.doctor: got auto, which has no effect")
    assert (
        without_effect(config_of(), {"engine", "train.lr", "train.batch_size", "train.microbatch_tokens"}, facts) == []
    )


@pytest.mark.parametrize("key", ["rollouts", "min_reward", "per_example", "temperature", "top_p", "top_k"])
def test_options_of_own_rollouts_are_refused_without_them(key):
    with pytest.raises(ConfigError, match=f"algo.{key}: got .*, which has no effect with source=task; set source"):
        config_of({f"algo.{key}": {"rollouts": 2, "per_example": None, "top_k": 3}.get(key, 0.5)})


def test_rollouts_that_fail_stop_the_stage(tmp_path):
    class Broken(FakeEngine):
        async def generate(self, request):
            raise ToolFailure("down")

    stage, _ = stage_of(tmp_path / "run", OWN, engine=Broken(seeded_letter))
    with pytest.raises(TooManyFailures, match=r"algo.source=rollouts: 100% of the rollouts failed"):
        train(stage)
    stage, _ = stage_of(tmp_path / "poor", {**OWN, "algo.min_reward": 5.0})
    with pytest.raises(ConfigError, match=r"algo.min_reward: none of the 32 rollouts has 5 or more"):
        train(stage)
