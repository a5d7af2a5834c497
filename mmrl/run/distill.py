"""Teachers of `algo.distill`: what stands against them, and what loads them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mmrl.algorithms import ALGORITHMS
from mmrl.config import RlRunConfig
from mmrl.config.tasks import PRIVILEGED, UNSCORED
from mmrl.config.teacher import FIELD, POLICY, is_url
from mmrl.engines.vllm.api import VllmApi
from mmrl.errors import ConfigError, EngineFailure, gathered, nearest, unknown
from mmrl.records import Call
from mmrl.run.build import check_policy, model_of_teacher, reward_set
from mmrl.stages.distillation import FEEDBACK, Scorer, privileged_problems
from mmrl.store.policy import INITIAL, resolve
from mmrl.system.http_client import HttpFailure
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmrl.models.load import ServedWeights
    from mmrl.trainer.forwards import Forwards

CONCURRENCY = 64
"""Calls that a server scores at once."""
TIMEOUT_S = 600.0
RETRIES = 5
"""Further attempts of a request, within some half a minute: a step that is sampled waits for its answer."""
PROBE = "The gold answer: \u201cSão Paulo\u201d, 42.5 %\n\tdef f(x): return x"
"""A text whose tokens differ between tokenizers."""


def module_problems(config: RlRunConfig, modules: Sequence[str], untrained: Collection[str] = ()) -> list[str]:
    """Return problems of `algo.distill`, `algo.privileged` and `task.reward=privileged` with a program's modules."""
    algo, problems = config.algo, []
    evidence = config.task.reward == PRIVILEGED
    for key, named in (("distill", algo.distill), ("privileged", algo.privileged)):
        for module in named or ():
            if module not in modules:
                problems.append(unknown(f"algo.{key}", module, modules))
            elif module in untrained or not algo.trains(module):
                problems.append(f"algo.{key}.{module}: has no effect: the module is not trained")
    problems += [
        f"algo.privileged.{module}: has no effect: the module has no teacher in algo.distill; give it one, or set "
        "task.reward=privileged"
        for module in algo.privileged or ()
        if module in modules and not evidence and module not in (algo.distill or {})
    ]
    if evidence and not algo.privileged:
        problems.append(
            "task.reward: got privileged, and nothing is; set algo.privileged.MODULE to a field of the record"
        )
    if algo.distill_kl == "exact" and config.hardware.sharding != "none":
        problems.append(
            f"algo.distill_kl: got exact, and with hardware.sharding={config.hardware.sharding} no process has the "
            "whole head that it needs in each chunk; use sampled, or hardware.sharding=none"
        )
    algorithm = ALGORITHMS[algo.name]
    if evidence and not (algorithm.needs_turn_rewards or algorithm.reads_turn_rewards):
        problems.append(f"task.reward: got privileged, which gives turn rewards, and algo={algo.name} reads none")
    return problems


def problems(config: RlRunConfig, task: Task) -> list[str]:
    """Return what stands against a run's teachers: records without a field, policies and servers that are not there."""
    algo, found = config.algo, privileged_problems(config.algo, task.examples("train"))
    for module, teacher in algo.models_that_teach.items():
        if is_url(teacher):
            with gathered(found, f"algo.distill.{module}: "):
                ScoringServer(teacher).check()
        else:
            try:
                resolve(teacher)
            except ConfigError as error:
                found += [
                    f"algo.distill.{module}: {problem.removeprefix('policy: ')}; or {POLICY}, {INITIAL}, the URL of a "
                    f"vLLM server{nearest(teacher, (POLICY, INITIAL))}"
                    for problem in error.problems
                ]
    reads_feedback = {
        module: text for module, text in (algo.privileged or {}).items() if FEEDBACK in FIELD.findall(text)
    }
    if reward_set(task, config.task.reward) == UNSCORED:
        found += [
            f"algo.privileged.{module}: got '{text}', and a task without a metric says nothing of a rollout; expected "
            "fields of the record alone, or a task.metric that gives feedback"
            for module, text in reads_feedback.items()
        ]
    if config.task.reward == PRIVILEGED:
        found += [
            f"algo.privileged.{module}: got '{text}', and a rollout that failed has no feedback: its turns would have "
            "the reward 0, where others of their group have sums of log-probabilities; expected fields of the record "
            "alone with task.reward=privileged"
            for module, text in reads_feedback.items()
        ]
    return found


def check(config: RlRunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Find teachers that cannot be had, or that have other tokens than the policy. Returns what is left out of files.

    Raises:
        ConfigError: one cannot be used.
    """
    from mmrl.models.load import vocabulary

    refused = list[str]()
    privileged, distilled = config.algo.privileged or {}, config.algo.distill or {}
    itself = {m: t for m, t in distilled.items() if t in (POLICY, INITIAL) and m not in privileged}
    # The initial weights teach nothing where there is nothing else that would lead away from them.
    alone = config.algo.name == "distill" and itself.keys() == distilled.keys()
    notes = [
        f"algo.distill.{module}: the policy is its own teacher ({teacher}) and reads no more than it does "
        "(algo.privileged), so it learns nothing from it"
        for module, teacher in itself.items()
        if alone or teacher == POLICY
    ]
    for module, teacher in config.algo.models_that_teach.items():
        key = f"algo.distill.{module}"
        if is_url(teacher):
            with gathered(refused, f"{key}: "):
                ScoringServer(teacher).check(tokenizer)
            continue
        policy = resolve(teacher)
        section = model_of_teacher(config.model, teacher, policy)
        notes.append(check_policy(policy, config.model_copy(update={"model": section}), key, reads=tokenizer))
        if policy.prompts is not None:
            notes.append(f"{key}: '{teacher}' has prompts of its own, which are left out: it reads the student's")
        if policy.modules is not None and module not in policy.modules:
            refused.append(
                f"{key}: got '{teacher}', which has weights for each of the modules {', '.join(policy.modules)}; "
                f"expected a policy with weights for {module}"
            )
        theirs = vocabulary(section)
        if theirs != tokenizer.get_vocab():
            refused.append(
                f"{key}: got '{teacher}', whose tokenizer has other tokens than that of '{config.model.path}' "
                f"({len(theirs)} and {len(tokenizer)}); a teacher scores the student's tokens, so it needs the same"
            )
    if refused:
        raise ConfigError(refused)
    return notes


def load_scorers(config: RlRunConfig, forwards: Forwards) -> tuple[Mapping[str, Scorer], Mapping[str, int | None]]:
    """Load the teachers that have weights of their own, each once; also return teacher -> longest prompt + completion
    that it scores, None without a limit.
    """
    from mmrl.engines.embedded.batch_rows import context_limit
    from mmrl.models.load import load_weights
    from mmrl.trainer.choice import choose_packing
    from mmrl.trainer.teaching import require_own_logits

    scorers = dict[str, Scorer]()
    own = context_limit(forwards.policy.config.get_text_config())
    limits: dict[str, int | None] = {POLICY: own, INITIAL: own}
    for teacher in dict.fromkeys(config.algo.models_that_teach.values()):
        if is_url(teacher):
            server = ScoringServer(teacher)
            limit = server.check()
            # One token less than its context: it must have room to write one.
            limits[teacher] = None if limit is None else limit - 1
            scorers[teacher] = server.score
            continue
        policy = resolve(teacher)
        section = model_of_teacher(config.model, teacher, policy)
        model, serving = load_weights(policy, section, config.hardware.device)
        for loaded in filter(None, (model, serving["initial"])):
            loaded.requires_grad_(False)
            # Also sets up the attention of each; the two are of one architecture.
            tries = choose_packing(config.train.packing, loaded)
            if config.algo.distill_kl == "exact":
                require_own_logits(forwards, loaded)
        limits[teacher] = context_limit(model.config.get_text_config())
        scorers[teacher] = partial(_scored, forwards, model, tries, serving)
        forwards.teachers[teacher] = partial(_weights_for, model, tries, serving)
    return scorers, limits


def _scored(
    forwards: Forwards, model: Any, tries: bool, serving: ServedWeights, calls: Sequence[Call]
) -> list[tuple[float, ...]]:
    """Score calls by a loaded teacher, each by its module's weights where the teacher has several."""
    names = serving["adapters"]
    if names is None:
        return forwards.logprobs_of(model, calls, tries=tries)
    scored: dict[int, tuple[float, ...]] = {}
    for name in dict.fromkeys(names[call.module] for call in calls):
        own = [call for call in calls if names[call.module] == name]
        weights, _ = _weights_for(model, tries, serving, own[0].module)
        scored |= dict(zip(map(id, own), forwards.logprobs_of(weights, own, tries=tries), strict=True))
    return [scored[id(call)] for call in calls]


def _weights_for(model: Any, tries: bool, serving: ServedWeights, module: str) -> tuple[Any, bool]:
    """Return a loaded teacher's model with its weights for a module, and whether it can forward packs of tries."""
    names, initial = serving["adapters"], serving["initial"]
    if names is not None and initial is None:
        model.set_adapter(names[module])
    # Beside a copy of its initial weights a teacher has no adapters.
    return (initial if names is not None and initial is not None and names[module] == INITIAL else model), tries


class ScoringServer:
    """A vLLM server that scores tokens: `prompt_logprobs` of its first model, at temperature 1."""

    def __init__(self, url: str) -> None:
        # People write the path of the protocol, too.
        self.api = VllmApi(url.rstrip("/").removesuffix("/v1"), TIMEOUT_S, CONCURRENCY, RETRIES)
        self.name: str | None = None

    def check(self, tokenizer: PreTrainedTokenizerBase | None = None) -> int | None:
        """Return the server's token limit.

        Args:
            tokenizer: the student's, with which the server's is compared; None: not.

        Raises:
            ConfigError: it does not answer, gives no such log-probabilities, or has other tokens.
        """

        async def asked() -> tuple[str, int | None, list[int]]:
            cards = await self.api.models()
            if not cards:
                raise LookupError("it serves no model")
            name, card = next(iter(cards.items()))
            reply = await self.api.request("/tokenize", {"model": name, "prompt": PROBE})
            await self.api.probe(name, reply["tokens"])
            return name, card.get("max_model_len"), reply["tokens"]

        try:
            self.name, limit, ids = self.api.io.wait(asked())
        except (HttpFailure, EngineFailure, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"got {self.api.url}: {str(error) or type(error).__name__}; expected the URL of a vLLM server, which "
                "takes token ids and gives prompt_logprobs"
            ) from None
        # As the server encodes it: a text of its own, before which some tokenizers put a blank.
        own = [] if tokenizer is None else tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        if own != ids[len(ids) - len(own) :]:
            raise ConfigError(
                f"got {self.api.url}, whose model '{self.name}' has other tokens than the policy; a teacher scores the "
                "student's tokens, so it needs the same tokenizer"
            )
        return limit

    def score(self, calls: Sequence[Call]) -> list[tuple[float, ...]]:
        """Return the log-probabilities of the calls' completions; after `check`.

        Raises:
            EngineFailure: the server did not answer, or with no such numbers.
        """
        assert self.name is not None

        async def every(name: str) -> list[list[float]]:
            return await asyncio.gather(
                *(self.api.score(name, call.prompt_ids + call.completion_ids) for call in calls)
            )

        try:
            found = self.api.io.wait(every(self.name))
        except HttpFailure as error:
            raise EngineFailure(f"algo.distill: {self.api.url}: {error}") from error
        return [tuple(row[-len(call.completion_ids) :]) for row, call in zip(found, calls, strict=True)]
