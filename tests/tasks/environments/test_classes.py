"""Environments as classes, as TRL documents them: prompts, tools, rewards, failures."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytest

from mmrl.errors import ConfigError, ProgramFailure
from mmrl.system.objects import register
from mmrl.tasks.environments import classes
from tests.helpers.gateway import named, one, rolled_out, tokenizer
from tests.helpers.worlds import (
    ROWS,
    Bad,
    Bare,
    Counter,
    Database,
    Stepwise,
    actions,
    environment_task,
    of_connection,
    of_environments,
    tool_call,
)

FOUR = (tool_call("add", step=1), tool_call("add", step=3))


def row(task: Any, number: int) -> Any:
    return [task.examples("train")[number]]


def test_prompts_are_those_of_trl() -> None:
    """TRL gives its template the bound methods in the order of `inspect.getmembers`, and appends what `reset` says."""
    task, engine = environment_task(), actions()
    one(task, engine, examples=row(task, 4))
    world = Counter()
    messages = [{"role": "user", "content": "Count. Reach 4."}]
    wanted = tokenizer("qwen3").apply_chat_template(
        messages, tools=[world.add, world.look], tokenize=False, add_generation_prompt=True
    )
    assert engine.prompts == [wanted]


def test_an_episode_is_played_and_scored_by_its_environment() -> None:
    task, engine = environment_task(), actions(*FOUR, tool_call("look"))
    rollout, calls = one(task, engine, examples=row(task, 4))
    assert (rollout.reward, rollout.error) == (1.0, None)
    assert "<tool_response>\n1\n</tool_response>" in engine.prompts[1]
    assert engine.prompts[3].endswith("<tool_response>\nit is 4\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert [call.module for call in calls] == ["agent"] * 4
    assert {"turns": 4, "tool_calls": 3, "tool_errors": 0, "answered": 1, "cut_short": 0, "score": 1}.items() <= dict(
        rollout.metrics
    ).items()
    assert rollout.prediction == {"text": "I am done.", "ended": "answer", "reward": 1.0}


def test_prompts_may_have_calls_of_tools() -> None:
    """As OpenAI writes them: null beside a call."""
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"step": 2}}}
    asked = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": None, "tool_calls": [called]}]
    task, engine = environment_task(rows=[{"prompt": [*asked, {"role": "tool", "content": "2"}]}]), actions()
    one(task, engine)
    assert tool_call("add", step=2) in engine.prompts[0] and "<tool_response>\n2 Reach 4." in engine.prompts[0]


def test_reset_gets_every_column() -> None:
    Counter.made.clear()
    task = environment_task(rows=[{"id": "a", "prompt": "Count.", "target": 2, "more": [1]}])
    one(task, actions())
    assert Counter.made[-1].columns == {"id": "a", "prompt": "Count.", "more": [1]} and Counter.made[-1].target == 2


def test_a_reward_function_reads_environments() -> None:
    task = environment_task(Bare, metric=of_environments)
    rollout, _ = one(task, actions(tool_call("echo", message="hello")))
    assert rollout.reward == 0.5


def batches(prompts: Any, completions: Any, target: Any, log_metric: Any, **columns: Any) -> list[float]:
    """TRL's form, with a column of the data and a metric of its own."""
    assert (
        columns["completion_ids"][0]
        and columns["id"] == ["r4"]
        and prompts == [[{"role": "user", "content": "Count. Reach 4."}]]
    )
    log_metric("messages", len(completions[0]))
    assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant", "tool", "assistant"]
    return [10.0 * (target[0] == 4)]


def about(record: Any, prediction: Any, environment: Any) -> dict[str, float]:
    return {"score": environment.count / 100, "words": len(prediction["text"].split())}


def test_rewards_add_up() -> None:
    """That of the environment and those of functions in both forms, as TRL sums them: 1 + 10 + 0.04."""
    task = environment_task(metric=(named(batches), named(about)))
    rollout, _ = one(task, actions(*FOUR), examples=row(task, 4))
    assert rollout.reward == pytest.approx(11.04)
    assert sorted(rollout.parts.values()) == pytest.approx([0.04, 1.0, 10.0]) and rollout.parts["environment"] == 1.0
    assert 5.0 in rollout.metrics.values() and 3.0 in rollout.metrics.values()  # messages and words


async def asks(completions: Any, **kwargs: Any) -> list[float]:
    return [0.25]


def test_reward_functions_may_be_async() -> None:
    assert one(environment_task(Bare, metric=asks), actions())[0].reward == 0.25


def none(completions: Any, **kwargs: Any) -> list[Any]:
    return [None]


def test_a_function_that_does_not_apply_adds_nothing_and_alone_is_no_reward() -> None:
    assert one(environment_task(metric=none), actions(*FOUR), examples=None)[0].reward == 0.0
    rollout, _ = one(environment_task(Bare, metric=none), actions())
    assert (rollout.error, rollout.reward) == ("reward", None)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (tool_call("add", step=-1), {"error": "step must not be negative"}),
        (tool_call("fly"), {"error": "Tool fly not found."}),
        (tool_call("reset"), {"error": "Tool reset not found."}),
    ],
)
def test_errors_of_tools_are_observations_as_trl_writes_them(call: str, wanted: object) -> None:
    engine = actions(call)
    rollout, _ = one(environment_task(), engine)
    assert f"<tool_response>\n{wanted}\n</tool_response>" in engine.prompts[1]
    assert rollout.metrics["tool_errors"] == 1 and rollout.error is None


class Caller(Counter):
    """Its columns and arguments have names that functions of mmrl have too."""

    def reset(self, function: str, key: int, name: str, **columns: Any) -> None:  # type: ignore[override]
        self.count, self.target, self.function = 0, 0, function

    def call(self, function: str, name: str) -> str:
        """
        Calls a function.

        Args:
            function: which
            name: of what
        """
        return f"{self.function} {function} {name}"


def of_function(completions: Any, function: list[str], **columns: Any) -> list[float]:
    return [float(len(function[0]))]


def test_columns_and_arguments_may_have_any_name() -> None:
    rows = [{"prompt": "Call.", "function": "sin", "key": 1, "name": "n", "args": 2, "source": 3, "row": 4}]
    task = environment_task(Caller, rows=rows, metric=of_function)
    engine = actions('<tool_call>\n{"name": "call", "arguments": {"function": "cos", "name": "x"}}\n</tool_call>')
    rollout, _ = one(task, engine)
    assert "<tool_response>\nsin cos x\n</tool_response>" in engine.prompts[1] and rollout.reward == 1.0 + 3.0


def raises(completions: Any, **kwargs: Any) -> list[float]:
    raise KeyError("gold")


def test_a_reward_function_that_raises_says_where() -> None:
    rollout, _ = one(environment_task(metric=raises), actions())
    assert (rollout.error, rollout.reward) == ("reward", None)
    assert "KeyError: 'gold'" in rollout.error_message and "in raises" in rollout.error_message


def test_an_action_that_raises_has_not_the_reward_of_the_one_before() -> None:
    task = environment_task(Stepwise)
    engine = actions(tool_call("add", step=2), tool_call("add", steps=2), tool_call("look"))
    _, calls = one(task, engine, reward_set="turn", examples=row(task, 4))
    assert [call.turn_reward for call in calls[:-1]] == [0.2, None, 0.2]


def test_wrong_arguments_are_an_observation() -> None:
    engine = actions(tool_call("add", steps=1))
    assert one(environment_task(), engine)[0].error is None
    assert "unexpected keyword argument 'steps'" in engine.prompts[1]


def test_errors_of_tools_may_fail_the_rollout() -> None:
    rollout, _ = one(environment_task(tool_errors="fail"), actions(tool_call("add", step=-1)))
    assert (rollout.error, rollout.reward) == ("tool", None) and "must not be negative" in rollout.error_message


def test_the_last_turn_acts_still() -> None:
    task = environment_task(max_turns=2)
    rollout, calls = one(task, actions(*FOUR, tool_call("add", step=1)), examples=row(task, 4))
    assert len(calls) == 2 and rollout.reward == 1.0 and rollout.metrics["cut_short"] == 1


def test_an_environment_may_end_an_episode_and_reward_turns() -> None:
    """Turns of 2, 5 and 3: rewards 0.2, 0.5, 0.3; the last one's is the outcome's, and at 8 it is over."""
    task = environment_task(Stepwise, max_turns=9)
    engine = actions(*(tool_call("add", step=n) for n in (2, 5, 3, 7)))
    rollout, calls = one(task, engine, reward_set="turn", examples=row(task, 4))
    assert [call.turn_reward for call in calls[:-1]] == [0.2, 0.5] and rollout.reward == pytest.approx(0.3)
    assert isinstance(rollout.prediction, dict) and rollout.prediction["ended"] == "done"
    assert [call.facts.get("state") for call in calls] == [None, "at 2", "at 7"]
    assert environment_task().reward_sets == ("outcome",)  # one without such rewards has no such set


def test_without_states_the_observation_is_the_state() -> None:
    _, calls = one(environment_task(), actions(*FOUR))
    assert [call.facts.get("state") for call in calls] == [None, "1", "4"]


def test_an_instance_stays_in_one_thread() -> None:
    """Of SQLite's connections, whose errors would be observations; the reward function's own call too."""
    task = environment_task(Database, metric=of_connection)
    engine = actions(tool_call("put", x=3), tool_call("put", x=4))
    rollout, _ = one(task, engine)
    assert rollout.metrics["tool_errors"] == 0 and rollout.reward == 3 + 4 + 4


def test_each_rollout_has_an_instance_that_is_closed() -> None:
    Counter.made.clear()
    task, engine = environment_task(), actions(*FOUR)
    forest = rolled_out(task, engine, examples=task.examples("train") * 1)
    used = [made for made in Counter.made if made.actions]
    assert len(forest.rollouts) == len(used) == len(ROWS) and all(made.closed == 1 for made in Counter.made)


def test_an_instance_is_closed_after_a_failure() -> None:
    Counter.made.clear()
    rollout, _ = one(environment_task(Bad), actions(tool_call("picture")))
    assert (rollout.error, Counter.made[-1].closed) == ("program", 1)
    assert "read text alone" in rollout.error_message


def test_a_tool_that_does_not_come_back() -> None:
    rollout, _ = one(environment_task(Bad, action_timeout_s=0.2), actions(tool_call("block")))
    assert (rollout.error, rollout.reward) == ("tool", None) and "task.action_timeout_s=0.2" in rollout.error_message


def test_too_many_that_do_not_come_back_end_further_episodes() -> None:
    """A run of them then stops by its share of failures."""
    task = environment_task(Bad)
    with patch.object(classes, "_abandoned", classes.MOST_ABANDONED):
        rollout, _ = one(task, actions())
    assert rollout.error == "tool" and "did not come back" in rollout.error_message


def test_a_tool_that_ends_the_process_ends_its_rollout() -> None:
    rollout, _ = one(environment_task(Bad), actions(tool_call("leave")))
    assert (rollout.error, rollout.reward) == ("program", None) and "SystemExit" in rollout.error_message


def test_long_observations_are_cut_with_a_mark() -> None:
    engine = actions(tool_call("long"))
    _, calls = one(environment_task(Bad, max_observation=50), engine)
    assert " […]\n</tool_response>" in engine.prompts[1] and 40 < calls[0].observation_tokens <= 50


def test_long_observations_without_spaces_are_cut_too() -> None:
    engine = actions(tool_call("dense"))
    _, calls = one(environment_task(Bad, max_observation=200), engine)
    assert '["item0","item1"' in engine.prompts[1] and 100 < calls[0].observation_tokens <= 200


def test_each_of_several_long_observations_is_cut() -> None:
    """Cut to one length, which is measured after a cut by characters: megabytes are not tokenized."""
    engine = actions("\n".join([tool_call("long"), tool_call("parts"), tool_call("long")]))
    _, calls = one(environment_task(Bad, max_observation=300), engine, max_tokens=200)
    first, second, third = engine.prompts[1].split("<tool_response>\n")[-3:]
    assert first == third.partition("<|im_end|>")[0] + "\n" and " […]" in first and second.startswith("one\ntwo\n")
    assert 250 < calls[0].observation_tokens <= 300


def test_half_a_character_is_replaced() -> None:
    engine = actions(tool_call("half"))
    assert one(environment_task(Bad), engine)[0].error is None
    assert "<tool_response>\na\ufffdb\n</tool_response>" in engine.prompts[1]


def test_parts_of_a_message_are_its_texts() -> None:
    engine = actions(tool_call("parts"))
    one(environment_task(Bad), engine)
    assert "<tool_response>\none\ntwo\n</tool_response>" in engine.prompts[1]


@pytest.mark.parametrize(
    "result",
    [
        [{"type": "book", "title": "x"}],
        [{"type": "text", "title": "x"}],
        [{"type": "text", "text": "a"}, {"type": "note", "text": "b"}],
        [{"type": ["book"]}, {"type": None}],
        [],
    ],
    ids=str,
)
def test_records_with_a_type_are_written_whole(result: Any) -> None:
    assert classes.text_of(result, "find") == str(result)


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_a_part_that_is_no_text_is_refused_beside_texts_too(kind: str) -> None:
    with pytest.raises(ProgramFailure, match=f"find gave a part of type '{kind}', and mmrl's models read text alone"):
        classes.text_of([{"type": "text", "text": "a"}, {"type": kind}], "find")


def test_no_room_ends_an_episode() -> None:
    task = environment_task(Bad, max_context=700)
    rollout, calls = one(task, actions(*[tool_call("long")] * 8))
    assert rollout.metrics["cut_short"] == 1 and rollout.error is None and 1 <= len(calls) < 8


def double(x: int) -> int:
    """
    Doubles a number.

    Args:
        x: the number
    """
    return 2 * x


CALL = tool_call("look")


@pytest.mark.parametrize(
    ("reply", "limit", "ended", "errors"),
    [
        ("I will add many things " * 60, 20, "length", 0),
        (CALL + " " * 300, 8, "length", 1),
        (CALL.replace("}", "", 1), 200, "answer", 1),
        ("I am done.", 200, "answer", 0),
    ],
)
def test_a_reply_that_is_cut_is_no_answer_and_a_call_that_nobody_reads_an_error(
    reply: str, limit: int, ended: str, errors: int
) -> None:
    rollout, _ = one(environment_task(), actions(reply), max_tokens=limit)
    assert (rollout.error, rollout.prediction["ended"]) == (None, ended)
    cut = float(ended == "length")
    counted = {"answered": 1.0 - cut, "cut_short": cut, "tool_calls": 0.0, "tool_errors": errors}
    assert counted.items() <= dict(rollout.metrics).items()


def test_functions_beside_an_environment_and_alone() -> None:
    tools = (register("doubled", double),)
    engine = actions(tool_call("doubled", x=21))
    rollout, _ = one(environment_task(tools=tools), engine, examples=None)
    assert "<tool_response>\n42\n</tool_response>" in engine.prompts[1] and rollout.metrics["tool_errors"] == 0
    alone = environment_task(None, tools=tools, metric=none_but_text)
    assert one(alone, actions(tool_call("doubled", x=21)))[0].reward == 3.0


def none_but_text(record: Any, prediction: Any) -> float:
    return float(len(prediction["text"].split()))


def test_environments_by_name() -> None:
    """The column `environment` chooses, `reset` does not get it, and a prompt has the tools of its own alone."""
    rows = [{"id": "a", "environment": "count", "target": 1}, {"id": "b", "environment": "say"}]
    task = environment_task({"count": Counter, "say": Bare}, rows=rows, metric=of_both)
    engine = actions()
    rolled_out(task, engine, examples=task.examples("train"))
    counting, saying = sorted(engine.prompts, key=lambda prompt: '"echo"' in prompt)
    assert '"add"' in counting and '"echo"' not in counting and '"add"' not in saying
    assert counting.endswith("<|im_start|>user\n Reach 1.<|im_end|>\n<|im_start|>assistant\n")


def of_both(environments: Any, **kwargs: Any) -> list[float]:
    return [0.5 for _ in environments]


def test_without_data_records_are_numbered() -> None:
    """An environment that draws its own episodes gets a seed; those of the splits are disjoint."""
    from mmrl.config import DataConfig
    from mmrl.config.tasks import EnvironmentConfig
    from mmrl.tasks import TASKS

    config = EnvironmentConfig(name="environment", environment=named(Counter), data=DataConfig(train_items=3))
    task = TASKS["environment"](config, 0)
    assert [example.inputs for example in task.examples("train")] == [{"seed": n} for n in range(3)]
    assert "mini world" not in str(task.describe()["data"])
    assert not {e.id for e in task.examples("dev")} & {e.id for e in task.examples("test")}
    Counter.made.clear()
    one(task, actions(), examples=[task.examples("train")[2]])
    assert Counter.made[-1].columns == {"seed": 2}
    assert task.describe()["data"] == "no files; a seed for each record", "which are not the mini world"


def test_the_environment_of_trl_for_harbor_is_read() -> None:
    """It needs Docker and a package to run; without, its reset says so, and the rollout is not credited."""
    from mmrl.config.tasks import EnvironmentConfig
    from mmrl.tasks import TASKS

    options: dict[str, Any] = {"metric": named(of_environments), "data": {"train": named([{"task_dir": "x"}])}}
    path = "trl.experimental.harbor:HarborBashEnv"
    task: Any = TASKS["environment"](EnvironmentConfig(name="environment", environment=path, **options), 0)
    assert [tool["function"]["name"] for tool in task.worlds[""].tools] == ["bash"]
    rollout, _ = one(task, actions())
    assert (rollout.error, rollout.reward) == ("program", None) and "harbor" in rollout.error_message


class NoReset:
    """No environment."""


class Untyped(Counter):
    """A tool without hints, and one without a docstring."""

    def first(self, x) -> int:
        """
        Doubles.

        Args:
            x: a number
        """
        return int(2 * x)

    def second(self, x: int) -> int:
        return x


class Unknown(Counter):
    """A hint that names nothing, as one that only type checkers import."""

    def first(self, x: Nothing) -> int:  # type: ignore[name-defined]  # noqa: F821
        """
        Doubles.

        Args:
            x: a number
        """
        return int(2 * x)


class Needy:
    """Wants an argument."""

    def __init__(self, url: str) -> None: ...


class Raising:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no server at :8000")


class Narrow(Counter):
    """Takes no other columns."""

    def reset(self, question: str) -> None:  # type: ignore[override]
        ...


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"world": NoReset}, "has no method `reset`"),
        ({"world": Untyped}, "a type for each argument"),
        ({"world": Needy}, "expected a class that is made without arguments"),
        ({"world": Raising}, "raised OSError: no server at :8000"),
        ({"world": 3}, "is a int, expected a class"),
        ({"world": Narrow}, "reset takes"),
        ({"world": None}, "task.environment: missing"),
        ({"tools_stateless": ("fly",)}, "task.tools_stateless: got fly, the tools are add, look"),
        ({"world": {"a": Counter}, "rows": [{"environment": "b"}]}, "environment is 'b', expected one of a"),
        ({"rows": [{"prompt": 3}]}, "prompt is 3, expected a text, or messages"),
        ({"rows": [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}]}, "whose content is no text"),
        ({"metric": lambda record: 1.0}, "expected (record, prediction)"),
        ({"metric": lambda completions, gold, **columns: [1.0]}, "asks for gold, and records have id, prompt, target"),
        ({"world": Unknown}, "name 'Nothing' is not defined"),
    ],
)
def test_what_is_no_environment_is_refused(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        environment_task(**options)
    assert wanted in str(refused.value)


def test_both_tools_that_do_not_say_what_they_take_are_named() -> None:
    with pytest.raises(ConfigError) as refused:
        environment_task(Untyped)
    assert len(refused.value.problems) == 2


def test_numbers_that_are_none_fail_the_reward() -> None:
    class Odd(Counter):
        def get_reward(self) -> Any:
            return "much"

    rollout, _ = one(environment_task(Odd), actions())
    assert (rollout.error, rollout.reward) == ("reward", None) and "get_reward gave 'much'" in rollout.error_message


def test_a_class_that_exits_is_no_end_of_the_process() -> None:
    def leaves() -> None:
        sys.exit(0)

    with pytest.raises(ConfigError, match="raised SystemExit: 0"):
        environment_task(leaves)
