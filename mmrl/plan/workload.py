"""Work of one step: calls by module, and their tokens before and after sharing.

Tokens come from dry rollouts (a few examples through the real program and engine; nothing is written, nothing trained)
where the weights are on this machine, else from lengths declared per module.
"""

from __future__ import annotations

import asyncio
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from itertools import pairwise, takewhile
from math import prod

from mmrl.algorithms import ALGORITHMS, assign_credit
from mmrl.config import RlRunConfig, RootConfig
from mmrl.errors import ConfigError
from mmrl.records import Call, Forest
from mmrl.rollout.plans import Fork, Tree
from mmrl.tasks.base import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a module's calls, and its number of calls."""

    prompt: int
    """Tokens of its first prompt on a path."""
    completion: int
    observation: int = 0
    """Tokens that a tool adds between two calls of a growing context; 0 with `calls` > 1: each prompt is fresh."""
    calls: int = 1
    """Calls on a path."""


# [0-9] and not \d, and no more digits than int() reads
_LENGTHS = re.compile(r"([^:]+):([0-9]{1,9})/([0-9]{1,9})(?:/([0-9]{1,9}))?(?:x([0-9]{1,9})?)?")
_SEARCH = {
    "rewriter": Lengths(prompt=250, completion=30),
    "reranker": Lengths(prompt=2000, completion=15),
    "answerer": Lengths(prompt=1200, completion=15),
}
_HOVER = Lengths(prompt=4000, completion=300, calls=3)
DECLARED: Mapping[str, Mapping[str, Lengths]] = {
    "hotpotqa": _SEARCH,
    "2wiki": _SEARCH,
    "musique": _SEARCH,
    # Three calls of each module in four hops; what an instruction has in common is not counted.
    "hover": {"generate_query.predict": _HOVER, "append_notes.predict": _HOVER},
    "search_agent": {"agent": Lengths(prompt=300, completion=105, observation=480, calls=4)},
    # Two searches of three documents, and an answer.
    "r1_searcher": {"searcher": Lengths(prompt=250, completion=120, observation=450, calls=3)},
    "search_o1": {
        "reasoner": Lengths(prompt=350, completion=300, observation=150, calls=3),
        "condenser": Lengths(prompt=2500, completion=150, calls=2),
    },
    "tool_agent": {"agent": Lengths(prompt=400, completion=300, observation=400, calls=2)},
}
"""Task -> module -> lengths with the papers' models and data (estimates; `lengths=` replaces them)."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a module in a step, or the sum over modules. Expected values, so not whole numbers."""

    calls: float = 0.0
    prompt: float = 0.0
    """Prompt tokens, each call's counted in full."""
    prompt_unique: float = 0.0
    """Prompt tokens that no other call of the step has computed already."""
    completion: float = 0.0
    trained: float = 0.0
    """Tokens of the calls that the update reads, prompts included, each call's counted in full."""
    trained_unique: float = 0.0
    """`trained` with shared prefixes counted once: what the update forwards."""
    decode_steps: float = 0.0
    """Tokens that have to be decoded one after the other."""
    continued: float = 0.0
    """Tokens of all calls of modules whose calls go on in the context of an earlier one; the embedded engine stores
    their keys and values for the next turn."""

    def __add__(self, other: Load) -> Load:
        return Load(*map(operator.add, astuple(self), astuple(other)))

    def scaled(self, factor: float) -> Load:
        """Multiply by `factor` everything that grows with the batch."""
        grown = Load(*(factor * number for number in astuple(self)))
        # Rows decode side by side, so more of them need no further steps.
        return replace(grown, decode_steps=self.decode_steps)


def declared(config: RlRunConfig, modules: Sequence[str], overrides: Mapping[str, Lengths]) -> dict[str, Load]:
    """Load of each module from lengths: what the algorithm's plans ask for, averaged over the draws of many examples.

    Args:
        overrides: lengths of the command line, by module.
    """
    # Plans that draw (round robin) differ from example to example: 200 of them give the mean to within a few percent.
    lengths = lengths_of(config, modules, overrides)
    algorithm, draws = ALGORITHMS[config.algo.name], 200
    total = {module: Load() for module in modules}
    for number in range(draws):
        trees = algorithm.plan(config.algo, modules, (config.seed, 1, f"plan-{number}"))
        for module, load in _trees(trees, modules, lengths, config).items():
            total[module] += load
    steps = {module: float(lengths[module].completion * lengths[module].calls) for module in modules}
    share = config.train.batch_size / draws
    return {module: replace(load.scaled(share), decode_steps=steps[module]) for module, load in total.items()}


def without_endpoints(loads: Mapping[str, Load], answered: Collection[str]) -> dict[str, Load]:
    """Return the loads with the calls of modules that an endpoint answers for, which cost these devices nothing."""
    return {module: Load(calls=load.calls) if module in answered else load for module, load in loads.items()}


def undeclared(config: RootConfig, modules: Sequence[str], overrides: Mapping[str, Lengths]) -> list[str]:
    """Return the modules whose lengths nobody has declared."""
    return [module for module in modules if module not in {**DECLARED.get(config.task.name, {}), **overrides}]


def lengths_of(config: RootConfig, modules: Sequence[str], overrides: Mapping[str, Lengths]) -> dict[str, Lengths]:
    """Return the lengths per module: of the command line, else the task's, else a guess from the task's limits.

    Raises:
        ConfigError: lengths for a module that the program does not have.
    """
    if stray := [name for name in overrides if name not in modules]:
        raise ConfigError(f"lengths: no module {', '.join(stray)}; expected some of {', '.join(modules)}")
    # A guess is marked as one (`undeclared`): by the task's limits, which bound a completion and not a prompt.
    lengths = {**DECLARED.get(config.task.name, {}), **overrides}
    guess = Lengths(prompt=1000, completion=config.task.max_tokens)
    return {module: lengths.get(module, guess) for module in modules}


def parse_lengths(text: str) -> dict[str, Lengths]:
    """Parse lengths: `rewriter:250/30,agent:300/105/480x4` is prompt / completion [/ observation] [x calls].

    Raises:
        ConfigError: text of another form.
    """
    lengths = {}
    for item in filter(None, text.split(",")):
        if (match := _LENGTHS.fullmatch(item)) is None:
            raise ConfigError(
                f"lengths: got '{item}', expected module:prompt/completion[/observation][xcalls], such as "
                "rewriter:250/30 or agent:300/105/480x4"
            )
        prompt, completion, observation, calls = (int(number or 0) for number in match.groups()[1:])
        lengths[match[1]] = Lengths(prompt=prompt, completion=completion, observation=observation, calls=max(1, calls))
    return lengths


def _trees(
    trees: Iterable[Tree], modules: Sequence[str], lengths: Mapping[str, Lengths], config: RlRunConfig
) -> dict[str, Load]:
    """Load of one example."""
    loads = {module: Load() for module in modules}
    count = sum(lengths[module].calls for module in modules)
    frozen = frozen_modules(config)
    in_loss = [module for module in modules if config.algo.trains(module) and module not in frozen]
    for number, tree in enumerate(trees):
        branches, before = Fraction(1), 0
        for index, module in enumerate(modules):
            size = lengths[module]
            # A growing tree continues from each of a rollout's `count` nodes equally often: its call number j is
            # sampled again from the j nodes before it.
            sampled = tree.growth.rounds * tree.growth.nodes if tree.growth else 0
            growth = 1 + Fraction(sampled * (2 * before + size.calls + 1), 2 * count)
            before += size.calls
            for turn in range(size.calls):
                # All trees of an example start with the same prompt, which is prefilled and forwarded once.
                first = index + turn == 0
                prompts = Fraction(0) if number and first else branches * (growth if turn else 1)
                widths = [fork.width for fork in tree.forks if _is_at(fork, module, turn, index)]
                branches *= prod(widths)
                # Calls that these two compare with nothing are not trained.
                alone = config.algo.name == "mhgpo_is" and tree.fork_name != module
                alone |= getattr(config.algo, "siblings", None) == "parent" and not widths
                trained = module in in_loss and not alone
                loads[module] += turn_load(size, turn, float(branches * growth), float(prompts), trained)
            # Replayed with a module's replies exchanged: the modules after it are sampled again.
            replays = branches * sum(name in modules[:index] for name in tree.exchange.modules) if tree.exchange else 0
            if replays:
                loads[module] += path_load(size, float(replays))
    return loads


def _is_at(fork: Fork, module: str, turn: int, index: int) -> bool:
    """Return True if a fork is at this turn of a module, the `index`-th of the program."""
    if fork.module is None:
        return index == 0 and turn == 0
    return (fork.module, fork.invocation) == (module, turn)


def frozen_modules(config: RlRunConfig) -> list[str]:
    """Return the modules that are not trained: by the config or the task, or since an endpoint answers for them."""
    frozen = [module for module, settings in (config.model.modules or {}).items() if settings.frozen]
    return [*frozen, *(config.engine.endpoints or ()), *getattr(config.task, "frozen", ())]


def path_load(size: Lengths, paths: float) -> Load:
    """Return `paths` paths through one module, untrained, that share nothing."""
    return sum((turn_load(size, turn, paths, paths, False) for turn in range(size.calls)), Load())


def turn_load(size: Lengths, turn: int, paths: float, prompts: float, trained: bool) -> Load:
    """Return one call of a module on each of `paths` paths, which have `prompts` prompts among them."""
    grown = size.prompt + (turn * (size.completion + size.observation) if size.observation else 0)
    raw_prompt, completion = paths * grown, paths * size.completion
    # In a growing context only the observation is new in a later prompt; with contexts of their own, all of it is.
    unique = prompts * (size.observation if turn and size.observation else size.prompt)
    return Load(
        calls=paths,
        prompt=raw_prompt,
        prompt_unique=unique,
        completion=completion,
        trained=(raw_prompt + completion) * trained,
        trained_unique=(unique + completion) * trained,
        continued=(raw_prompt + completion) * (size.observation > 0 and size.calls > 1),
    )


def loads_of(forest: Forest, trained: set[str], factor: float) -> dict[str, Load]:
    """Load of each module of a forest, `factor` times.

    Args:
        trained: ids of the calls that the update reads.
    """
    loads = {}
    # The trie of all modules so far: what a later module shares with an earlier one is forwarded once, not per module.
    read: list[tuple[int, ...]] = []
    shared_before = 0
    for module in forest.modules:
        calls = [call for call in forest.calls.values() if call.module == module]
        read += [call.prompt_ids + call.completion_ids for call in calls if call.id in trained]
        shared = unique_tokens(read)
        # Completions that stand again in the prompts of later turns of their own contexts are never prefilled anew.
        continued = {call.parent for call in calls if call.turn > 0}
        reread = sum(call.completion_tokens for call in calls if call.id in continued)
        prompt, completion = sum(len(call.prompt_ids) for call in calls), sum(call.completion_tokens for call in calls)
        load = Load(
            calls=len(calls),
            prompt=prompt,
            prompt_unique=max(0, unique_tokens({call.prompt_ids for call in calls}) - reread),
            completion=completion,
            trained=sum(len(call.prompt_ids) + call.completion_tokens for call in calls if call.id in trained),
            trained_unique=shared - shared_before,
            continued=(prompt + completion) * bool(continued),
        )
        shared_before = shared
        turns = 1 + max((call.turn for call in calls), default=0)
        longest = max((call.completion_tokens for call in calls), default=0)
        loads[module] = replace(load.scaled(factor), decode_steps=float(longest * turns))
    return loads


def declared_rollout(
    config: RootConfig, modules: Sequence[str], overrides: Mapping[str, Lengths], answered: Collection[str] = ()
) -> dict[str, Load]:
    """Load of one rollout of an evaluation by module, from lengths.

    Args:
        overrides: lengths of the command line, by module.
        answered: modules whose calls cost these devices nothing: an endpoint answers.
    """
    return {
        module: replace(path_load(size, 1), decode_steps=float(size.completion * size.calls))
        for module, size in lengths_of(config, modules, overrides).items()
        if module not in answered
    }


def mean_rollout(forest: Forest, answered: Collection[str] = ()) -> dict[str, Load]:
    """Load of one rollout by module, the mean over a forest; prefixes that rollouts share are not taken off."""
    loads = {}
    for module in forest.modules:
        total, steps = Load(), 0
        goes_on = any(call.turn for call in forest.calls.values() if call.module == module)
        for rollout in forest.rollouts:
            calls = [call for call in forest.path(rollout) if call.module == module and module not in answered]
            prompts = [len(call.prompt_ids) for call in calls]
            completion = sum(call.completion_tokens for call in calls)
            # Of a later turn of one context only what was added since the turn before is prefilled.
            before = sum(len(last.prompt_ids) + last.completion_tokens for last, call in pairwise(calls) if call.turn)
            total += Load(
                calls=len(calls),
                prompt=sum(prompts),
                prompt_unique=sum(prompts) - before,
                completion=completion,
                continued=(sum(prompts) + completion) * goes_on,
            )
            steps = max(steps, completion)
        loads[module] = replace(total.scaled(1 / max(1, len(forest.rollouts))), decode_steps=float(steps))
    return loads


def trained_calls(forest: Forest, config: RlRunConfig) -> set[str]:
    """Return the ids of the calls that carry a weight under the algorithm."""

    def completed(call: Call) -> Call:
        """Return zeros for what a critic, a reference or a teacher says: which calls train does not depend on it."""
        observed = call.observation_tokens if getattr(config.algo, "obs", "all") == "all" else 0
        taught = (0.0,) * call.completion_tokens if call.module in (config.algo.distill or {}) else None
        values = (0.0,) * (call.completion_tokens + observed)
        return replace(call, values=values, ref_logprobs=call.logprobs, distillation=taught)

    calls = {key: completed(call) for key, call in forest.calls.items()}
    credit = assign_credit(replace(forest, calls=calls), config.algo, config.seed, frozen=frozen_modules(config))
    return {entry.call for entry in credit.entries if any(entry.weights)}


def dry_rollouts(config: RlRunConfig, task: Task, reward_set: str, examples: int) -> Forest:
    """Sample as the algorithm does, for `examples` examples, by the weights that are here."""
    import torch

    from mmrl.engines import EngineSetup, engine_class
    from mmrl.models.load import load_model, load_tokenizer
    from mmrl.rollout.environment import make_environment, sampling_settings
    from mmrl.rollout.sample import sample

    torch.set_num_threads(config.hardware.threads or 1)
    algo = config.algo
    tokenizer = load_tokenizer(config.model)
    # The embedded engine, whatever the run will use: dry rollouts count tokens, and no server need be started for that.
    cuda = torch.cuda.is_available()
    weights = config.model.model_copy(update={"matmul": "torch"}) if cuda else config.model
    engine = engine_class("transformers")(
        load_model(weights, "cuda" if cuda else "cpu").eval(),
        tokenizer,
        config.engine.in_process,
        EngineSetup(max_context=config.task.max_context, threads=config.hardware.threads),
    )
    settings = sampling_settings(algo, config.task)
    env = make_environment(task, engine, tokenizer, settings, (config.seed, "plan"))
    plans = []
    for example in task.examples("train")[:examples]:
        trees = ALGORITHMS[algo.name].plan(algo, task.program.modules, (config.seed, 1, example.id))
        # The student stands in for teachers, whose calls cost about the same.
        plans.append((example, [replace(tree, teacher=None) for tree in trees]))
    return asyncio.run(sample(env, plans, reward_set))


def unique_tokens(sequences: Iterable[tuple[int, ...]]) -> int:
    """Return the nodes of the prefix trie of `sequences`: tokens left when every shared prefix is counted once."""
    # Sorted, a sequence shares its longest prefix with the one before it, so the trie need not be built.
    count = 0
    before: tuple[int, ...] = ()
    for sequence in sorted(sequences):
        pairs = zip(before, sequence, strict=False)
        count += len(sequence) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        before = sequence
    return count
