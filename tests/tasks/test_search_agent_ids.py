"""The search agent's token ids: observations counted and cut as sampled, demonstrations with the ids of a run."""

from functools import partial

import pytest

from mmrl.engines.base import Completion
from mmrl.models.chat import decode_text, encode_text, render_observation, render_prompt
from mmrl.stages.sft import encode
from mmrl.tasks import TASKS
from mmrl.tasks.mini.teach import demonstrations
from tests.helpers.programs import EXAMPLE, FakeEngine, default_config, environment, forest_of, make
from tests.models.test_models import make_tokenizer
from tests.tasks.test_search_agent import ASK, RIGHT, ROOMY


@pytest.fixture
def task(tmp_path):
    return make("search_agent", tmp_path, **ROOMY)


class Known(FakeEngine):
    """Says what a demonstration says, if the prompt has exactly its ids."""

    async def generate(self, request):
        ids = self.answer(request)
        return Completion(ids=ids, logprobs=(-0.5,) * len(ids), finish="stop")


def replayed(name, items=60):
    """Rollouts of an engine that only knows what the warm start is taught, under a real tokenizer and template."""
    tokenizer = make_tokenizer()
    task = TASKS[name](default_config(name, max_observation=2000, max_context=9000), 0)
    if name == "tool_agent":
        task = TASKS[name](default_config(name, max_observation=2000, max_completion=4000, max_tokens=400), 0)
    examples = [example for example in task.examples("dev")[:items] if demonstrations(task, example)]
    taught = [shown for example in examples for shown in demonstrations(task, example)]
    known = {item.prompt_ids: item.completion_ids[:-1] for item in (encode(tokenizer, one) for one in taught)}
    env = environment(task, Known(lambda request: known.get(request.prompt_ids, (1,))))
    env.render, env.extend = partial(render_prompt, tokenizer), partial(render_observation, tokenizer)
    env.decode = partial(decode_text, tokenizer)
    forest = forest_of(env, examples, reward_set="turn")
    return task, forest, taught


@pytest.mark.parametrize("ended", [False, True])
def test_observation_tokens_are_counted_and_cut_alike_after_a_sampled_end_of_turn(task, ended):
    tokenizer = make_tokenizer()
    end = (tokenizer.eos_token_id,) * ended

    def say(request):
        searched = decode_text(tokenizer, request.prompt_ids).endswith("</information>\n\n")
        return (*encode_text(tokenizer, RIGHT if searched else ASK), *end)

    env = environment(task, Known(say))
    env.render, env.extend = partial(render_prompt, tokenizer), partial(render_observation, tokenizer)
    env.decode = partial(decode_text, tokenizer)
    for limit in (4000, 60):
        task.program.max_observation = limit
        forest = forest_of(env, [EXAMPLE], reward_set="turn")
        first, second = forest.path(forest.rollouts[0])
        kept = len(first.prompt_ids) + first.completion_tokens - len(end)
        assert first.observation_tokens == len(second.prompt_ids) - kept
        assert first.observation_tokens <= limit
        assert second.prompt_ids[kept:] == tuple(encode_text(tokenizer, second.prompt_text))
        assert (limit == 60) == (first.observation_tokens > 40 and "Porto" not in second.prompt_text)


def test_demonstrations_have_the_ids_of_a_run_and_earn_everything():
    _, forest, taught = replayed("search_agent")
    assert len(forest.calls) == len(taught)
    assert all(rollout.reward == 1.0 and rollout.metrics["format"] == 1.0 for rollout in forest.rollouts)
    assert all(rollout.metrics["retrieval"] == 1.0 for rollout in forest.rollouts)
    assert {rollout.metrics["searches"] for rollout in forest.rollouts} == {1.0, 2.0}


def test_a_demonstrations_history_is_seen_and_not_trained():
    tokenizer = make_tokenizer()
    task = TASKS["search_agent"](default_config("search_agent"), 0)
    shown = demonstrations(task, next(e for e in task.examples("dev") if e.metadata["type"] == "bridge"))
    first, second, third = (encode(tokenizer, one) for one in shown)
    assert third.prompt_ids[: len(second.prompt_ids)] == second.prompt_ids
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert tuple(encode_text(tokenizer, shown[2].completion)) == third.completion_ids[:-1]
    assert "<information>" not in decode_text(tokenizer, third.completion_ids)
