"""The search agent's token ids: observations counted and cut as sampled."""

from functools import partial
from typing import Any

import pytest

from mmrl.engines.base import Completion
from mmrl.models.chat import decode_text, encode_text, render_observation, render_prompt
from tests.helpers.programs import EXAMPLE, FakeEngine, environment, forest_of, make
from tests.models.test_models import make_tokenizer
from tests.tasks.test_search_agent import ASK, RIGHT, ROOMY


@pytest.fixture
def task(tmp_path):
    return make("search_agent", tmp_path, **ROOMY)


class Known(FakeEngine):
    """Says what a demonstration says, if the prompt has exactly its ids."""

    async def generate(self, request):
        ids: Any = self.answer(request)
        return Completion(ids=ids, logprobs=(-0.5,) * len(ids), finish="eos" if ids[-1:] == self.end else "stop")

    end: tuple[int, ...] = ()


@pytest.mark.parametrize("ended", [False, True])
def test_observation_tokens_are_counted_and_cut_alike_after_a_sampled_end_of_turn(task, ended):
    tokenizer = make_tokenizer()
    end = (tokenizer.eos_token_id,) * ended

    def say(request):
        searched = decode_text(tokenizer, request.prompt_ids).endswith("</information>\n\n")
        return (*encode_text(tokenizer, RIGHT if searched else ASK), *end)

    engine = Known(say)
    engine.end = (tokenizer.eos_token_id,)
    env = environment(task, engine)
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
