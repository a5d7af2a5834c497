"""Demonstrations of the mini world: whoever says them is asked the prompts that they hold, and earns everything."""

from collections import Counter
from functools import partial
from typing import Any

import pytest

from mmrl.models.chat import decode_text, encode_text, render_observation, render_prompt
from mmrl.rollout import with_program
from mmrl.stages.sft import encode
from mmrl.tasks import TASKS
from mmrl.tasks.mini.teach import demonstrations
from tests.helpers.programs import default_config, environment, filled, forest_of
from tests.models.test_models import make_tokenizer
from tests.tasks.test_search_agent_ids import Known

ROOM = {"max_observation": 4000, "max_context": 9000, "max_tokens": 400}
TURNS = {"max_observation": 2000, "max_completion": 4000, "max_tokens": 400}
FOUND = {"gold_retrieved": 1.0}
# What nothing demonstrates: the notes of hover's third hop, where nothing new is found.
OTHER = filled(reasoning="so", new_key_facts="nothing new", **{f"search_query{n}": "None" for n in (1, 2, 3)})


@pytest.mark.parametrize(
    ("name", "modules", "sizes", "kinds"),
    [
        ("hotpotqa", ("rewriter", "reranker", "answerer"), [2400, 400, 400], {"bridge": 300, "comparison": 100}),
        ("2wiki", ("rewriter", "reranker", "answerer"), [1200, 200, 200], {"bridge": 100, "comparison": 100}),
        ("musique", ("rewriter", "reranker", "answerer"), [1800, 300, 300], {"bridge": 300}),
        ("search_agent", ("agent",), [2400, 360, 360], {"single": 240, "bridge": 120}),
        ("tool_agent", ("agent",), [1600, 240, 240], {"single": 240}),
        ("banking77", ("classify.predict",), [1200, 400, 400], {None: 400}),
        ("papillon", ("craft_redacted_request.predict", "respond_to_query"), [800, 300, 300], {None: 300}),
        ("hover", ("generate_query.predict", "append_notes.predict"), [800, 300, 300], {None: 300}),
    ],
)
def test_the_default_is_the_mini_world(name, modules, sizes, kinds):
    task = with_program(TASKS[name](default_config(name), 0))
    assert (task.program.modules, task.describe()["data"]) == (modules, "mini world")
    assert "partial corpus" not in task.describe()
    assert [len(task.examples(split)) for split in ("train", "dev", "test")] == sizes
    assert Counter(example.metadata.get("type") for example in task.examples("dev")) == kinds


@pytest.mark.parametrize(
    ("name", "reward_set", "options", "best", "share", "metrics"),
    [
        ("hotpotqa", "outcome", {}, 1.0, 0.95, {"em": 1.0, "gold_selected": 1.0}),
        ("search_agent", "turn", ROOM, 1.0, 1.0, {"format": 1.0, "retrieval": 1.0}),
        ("tool_agent", "turn", TURNS, 1.9, 1.0, {"result_answer": 0.5}),
        ("search_o1", "outcome", ROOM, 1.0, 1.0, FOUND),
        ("r1_searcher", "outcome", ROOM, 1.0, 1.0, FOUND),
        ("r1_searcher", "stage1", ROOM, 2.0, 1.0, FOUND),
        ("qa_direct", "outcome", {"chain_of_thought": False}, 1.0, 1.0, {"em": 1.0}),
        ("qa_direct", "outcome", {"chain_of_thought": True}, 1.0, 1.0, {"em": 1.0}),
        ("banking77", "outcome", {}, 1.0, 1.0, {"em": 1.0}),
        ("papillon", "outcome", {}, 1.0, 1.0, {"score": 1.0, "quality": 1.0, "leakage": 0.0}),
        ("hover", "outcome", {}, 1.0, 0.9, {"all_titles": 1.0}),
    ],
)
def test_demonstrations_have_the_ids_of_a_run_and_earn_everything(name, reward_set, options, best, share, metrics):
    tokenizer = make_tokenizer()
    task = with_program(TASKS[name](default_config(name, **options), 0))
    examples = [example for example in task.examples("dev")[:60] if demonstrations(task, example)]
    taught = [encode(tokenizer, shown) for example in examples for shown in demonstrations(task, example)]
    known: dict[Any, Any] = {item.prompt_ids: item.completion_ids[:-1] for item in taught}
    other = tuple(encode_text(tokenizer, OTHER))
    env = environment(task, Known(lambda request: known.get(request.prompt_ids, other)))
    env.render, env.extend = partial(render_prompt, tokenizer), partial(render_observation, tokenizer)
    env.decode = partial(decode_text, tokenizer)
    forest = forest_of(env, examples, reward_set=reward_set)
    assert len(examples) >= 48 and not any(rollout.error for rollout in forest.rollouts)
    assert sum(rollout.reward for rollout in forest.rollouts) >= share * best * len(examples) - 1e-6
    for rollout in forest.rollouts:
        if rollout.reward == pytest.approx(best):
            assert {key: rollout.metrics[key] for key in metrics} == pytest.approx(metrics)
            assert [call.penalty for call in forest.path(rollout)] == [0.0] * len(forest.path(rollout))
    if name not in ("hotpotqa", "qa_direct", "hover"):  # where some stand for other configs, or for poorer modules
        assert {call.prompt_ids for call in forest.calls.values()} == set(known)
