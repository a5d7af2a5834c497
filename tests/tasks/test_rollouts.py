"""The search program under the real sampler, with a policy that babbles."""

import json

import pytest

from mmrl.config.tasks import MultihopQaConfig
from mmrl.rollout.plans import fork_on, fork_on_first, independent
from mmrl.tasks import TASKS
from tests.helpers.programs import play_dspy, spelled


@pytest.fixture
def task():
    return TASKS["hotpotqa"](MultihopQaConfig(name="hotpotqa"), 0)


def babble(request):
    texts = ["", "### ;;; ###", "### a;b;c;d;e;f ###", "99, 1, 1", "{} %s <|im_end|>", "word " * 40]
    return texts[request.sampling.seed % len(texts)] + spelled(request.prompt_ids[:1])


@pytest.mark.parametrize("plan", [independent(3), fork_on_first(("rewriter",), 3), fork_on("answerer", 3)])
def test_no_output_of_a_policy_makes_the_program_fail(task, plan):
    examples = task.examples("train")[:20]
    forest = play_dspy(task, babble, examples, plan)
    assert len(forest.rollouts) == 60
    assert not any(rollout.error for rollout in forest.rollouts)
    assert {call.penalty for call in forest.calls.values()} == {0.0, -0.5, -1.0}
    json.dumps([rollout.prediction for rollout in forest.rollouts])
    json.dumps([dict(call.facts) for call in forest.calls.values()])
