"""What credit wants to know from models before it runs: the critic's values, the reference's log-probabilities.

Part of `trainer`; `stages.weights` calls it between sampling and credit. Forests in, forests out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mmrl.errors import MmrlError
from mmrl.records import Call, Forest
from mmrl.trainer.forwards import Forwards
from mmrl.trainer.objective import TrainCall


def annotate(trainer: Forwards, forest: Forest) -> Forest:
    """The forest with `values` and `ref_logprobs` on the calls of algorithms that need them; others are unchanged.

    Values run over a call's observation too with `algo.obs=all`; an observation's tokens are read from the prompt of
    the call that follows in the same context. Calls without sampled tokens get empty tuples.
    """
    settings = trainer.settings
    critic = settings.critic
    if critic is None:
        return forest
    calls = [call for call in forest.calls.values() if call.completion_ids]
    plain = [_plain(call, ()) for call in calls]
    references: list[tuple[float, ...]] | list[None] = [None] * len(calls)
    if settings.algo.beta > 0:
        references = trainer.policy_logprobs(plain, reference=True)
    if getattr(critic, "obs", "skip") == "all":
        plain = [_plain(call, observation_ids(forest, call)) for call in calls]
    values = trainer.values(plain)
    found: dict[str, Call] = {}
    for call, value, reference in zip(calls, values, references, strict=True):
        found[call.id] = replace(call, values=value, ref_logprobs=reference)
    empty: Mapping[str, Call] = {
        call.id: replace(call, values=(), ref_logprobs=()) for call in forest.calls.values() if not call.completion_ids
    }
    return replace(forest, calls={call_id: found.get(call_id) or empty[call_id] for call_id in forest.calls})


def observation_ids(forest: Forest, call: Call) -> tuple[int, ...]:
    """The tool tokens that follow `call` in its own context, length `call.observation_tokens`.

    Raises:
        MmrlError: no later call holds them.
    """
    if not call.observation_tokens:
        return ()
    context = call.prompt_ids + call.completion_ids
    for child in forest.children[call.id]:
        following = forest.calls[child].prompt_ids
        if following[: len(context)] == context and len(following) >= len(context) + call.observation_tokens:
            return following[len(context) : len(context) + call.observation_tokens]
    raise MmrlError(
        f"algo.obs: all needs the ids of the {call.observation_tokens} observation tokens after call {call.id}, "
        "and no call goes on in its context; use algo.obs=skip"
    )


def _plain(call: Call, observation: tuple[int, ...]) -> TrainCall:
    return TrainCall(
        id=call.id, module=call.module, prompt_ids=call.prompt_ids, completion_ids=call.completion_ids + observation
    )
