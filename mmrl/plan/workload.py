"""How much one step asks for: calls by module, and their tokens before and after sharing.

Tokens come from dry rollouts (a few examples through the real program and engine; nothing is written, nothing trained)
where the weights are on this machine, else from lengths declared per module.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from mmrl.algorithms import ALGORITHMS, assign_credit
from mmrl.config import RootConfig, TrainCommandConfig
from mmrl.errors import ConfigError
from mmrl.records import Call, Forest
from mmrl.rollout.plans import Tree
from mmrl.tasks.base import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of one module's calls, and how often it is called."""

    prompt: int
    """Of its first call on a path."""
    completion: int
    observation: int = 0
    """What a tool adds between two calls of one growing context; 0 with `calls` > 1: every call has a fresh prompt."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One module in one step, or the sum over modules. Expected values, so not whole numbers."""

    calls: float = 0.0
    prompt: float = 0.0
    """Prompt tokens, each call's counted in full."""
    prompt_unique: float = 0.0
    """Prompt tokens that no other call of the step has computed already."""
    completion: float = 0.0
    trained: float = 0.0
    """Tokens of the calls that the update reads, prompts included, each call's counted in full."""
    trained_unique: float = 0.0
    """The same with shared prefixes counted once: what the update forwards."""
    decode_steps: float = 0.0
    """Tokens that have to be decoded one after the other."""

    def __add__(self, other: Load) -> Load:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(Load)}
        return Load(**sums)

    def scaled(self, factor: float) -> Load:
        """`factor` times as much of everything that grows with the batch."""
        # Rows decode side by side, so more of them need no further steps.
        return replace(
            self, **{f.name: getattr(self, f.name) * factor for f in fields(Load) if f.name != "decode_steps"}
        )


def declared(config: TrainCommandConfig, modules: Sequence[str], given: Mapping[str, Lengths]) -> dict[str, Load]:
    """Load of each module from lengths: what the algorithm's plans ask for, averaged over the draws of many examples.

    Args:
        given: lengths that the user typed, by module.
    """
    # Plans that draw (round robin) differ from example to example: 200 of them give the mean to within a few percent.
    lengths = lengths_of(config, modules, given)
    algorithm, draws = ALGORITHMS[config.algo.name], 200
    total = {module: Load() for module in modules}
    for number in range(draws):
        trees = algorithm.plan(config.algo, modules, (config.seed, 1, f"plan-{number}"))
        for module, load in _trees(trees, modules, lengths, config).items():
            total[module] = total[module] + load
    steps = {module: float(lengths[module].completion * lengths[module].calls) for module in modules}
    share = config.train.batch_size / draws
    return {module: replace(load.scaled(share), decode_steps=steps[module]) for module, load in total.items()}


def without_endpoints(loads: Mapping[str, Load], answered: Collection[str]) -> dict[str, Load]:
    """The loads with the calls of modules that an endpoint answers for, which cost these devices nothing."""
    return {module: Load(calls=load.calls) if module in answered else load for module, load in loads.items()}


def undeclared(config: RootConfig, modules: Sequence[str], given: Mapping[str, Lengths]) -> list[str]:
    """Modules whose lengths nobody has declared."""
    return [m for m in modules if m not in given and m not in DECLARED.get(config.task.name, {})]


def lengths_of(config: RootConfig, modules: Sequence[str], given: Mapping[str, Lengths]) -> dict[str, Lengths]:
    """Lengths per module: typed, else declared for the task, else a guess from the task's limits.

    Raises:
        ConfigError: typed lengths for a module that the program does not have.
    """
    strange = [name for name in given if name not in modules]
    if strange:
        raise ConfigError(f"lengths: no module {', '.join(strange)}; expected some of {', '.join(modules)}")
    # A guess is marked as one (`undeclared`): by the task's limits, which bound a completion and not a prompt.
    known = DECLARED.get(config.task.name, {})
    guess = Lengths(prompt=1000, completion=config.task.max_tokens)
    return {module: given.get(module, known.get(module, guess)) for module in modules}


def parse_lengths(text: str) -> dict[str, Lengths]:
    """`rewriter:250/30,agent:300/105/480x4` -> lengths: prompt / completion [/ observation] [x calls].

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
    trees: Iterable[Tree], modules: Sequence[str], lengths: Mapping[str, Lengths], config: TrainCommandConfig
) -> dict[str, Load]:
    """Load of one example."""
    loads = {module: Load() for module in modules}
    # All trees of an example start with the same prompt, which is prefilled and forwarded once.
    first_prompt_counted = False
    count = sum(lengths[module].calls for module in modules)
    for tree in trees:
        branches, before = Fraction(1), 0
        for index, module in enumerate(modules):
            prompts = branches
            for fork in tree.forks:
                if fork.module == module or (fork.module is None and index == 0):
                    branches *= fork.width
            own = lengths[module].calls
            # A growing tree goes on from each of a rollout's `count` nodes equally often: its call number j is sampled
            # again from the j nodes before it.
            drawn = tree.growth.rounds * tree.growth.nodes if tree.growth else 0
            grown = branches * (1 + Fraction(drawn * (2 * before + own + 1), 2 * count))
            before += own
            fresh = Fraction(0) if index == 0 and first_prompt_counted else prompts
            trained = _is_trained(config, tree, module)
            loads[module] = loads[module] + path_load(lengths[module], float(grown), float(fresh), trained)
            # Played again with the replies of a module exchanged: what comes after that module is sampled anew.
            again = branches * sum(name in modules[:index] for name in tree.exchange.modules) if tree.exchange else 0
            if again:
                loads[module] = loads[module] + path_load(lengths[module], float(again), float(again), False)
        first_prompt_counted = True
    return loads


def _is_trained(config: TrainCommandConfig, tree: Tree, module: str) -> bool:
    """Whether calls of `module` in `tree` enter the loss."""
    algo = config.algo
    if not algo.trains(module):
        return False
    if module in (config.engine.endpoints or ()):
        return False
    if module in (config.model.modules or {}) and (config.model.modules or {})[module].frozen:
        return False
    return algo.name != "mhgpo_is" or tree.fork_name == module


def path_load(size: Lengths, paths: float, prompts: float, trained: bool) -> Load:
    """`paths` paths through one module that share `prompts` first prompts."""
    grown = [size.prompt + turn * (size.completion + size.observation) for turn in range(size.calls)]
    # In a growing context only the observation is new in a later prompt; with contexts of their own, all of it is.
    if size.observation:
        raw_prompt = paths * sum(grown)
        unique = prompts * size.prompt + paths * (size.calls - 1) * size.observation
    else:
        raw_prompt = paths * size.calls * size.prompt
        unique = prompts * size.prompt + paths * (size.calls - 1) * size.prompt
    completion = paths * size.calls * size.completion
    return Load(
        calls=paths * size.calls,
        prompt=raw_prompt,
        prompt_unique=unique,
        completion=completion,
        trained=(raw_prompt + completion) * trained,
        trained_unique=(unique + completion) * trained,
    )


def loads_of(forest: Forest, trained: set[str], factor: float) -> dict[str, Load]:
    """Load of each module of a forest, `factor` times.

    Args:
        trained: ids of the calls that the update reads.
    """
    loads = {}
    # The trie of all modules so far: what a later module shares with an earlier one is forwarded once, not per module.
    shared_before = 0
    calls: list[Call] = []
    for module in forest.modules:
        own = [call for call in forest.calls.values() if call.module == module]
        calls += own
        prompts = unique_tokens({call.prompt_ids for call in own})
        completion = sum(call.completion_tokens for call in own)
        read = [call for call in calls if call.id in trained]
        shared = unique_tokens(call.prompt_ids + call.completion_ids for call in read)
        load = Load(
            calls=len(own),
            prompt=sum(len(call.prompt_ids) for call in own),
            prompt_unique=max(0, prompts - _reread(own)),
            completion=completion,
            trained=sum(len(c.prompt_ids) + c.completion_tokens for c in own if c.id in trained),
            trained_unique=shared - shared_before,
        )
        shared_before = shared
        steps = max((call.completion_tokens for call in own), default=0) * (1 + max((c.turn for c in own), default=0))
        loads[module] = replace(load.scaled(factor), decode_steps=float(steps))
    return loads


def _reread(calls: list[Call]) -> int:
    """Completion tokens that stand again in the prompts of later turns of their own contexts: never prefilled anew."""
    parents = {call.parent for call in calls if call.turn > 0}
    return sum(call.completion_tokens for call in calls if call.id in parents)


def trained_calls(forest: Forest, config: TrainCommandConfig) -> set[str]:
    """Ids of the calls that carry a weight under the algorithm (values and references taken as zero)."""
    calls: Mapping[str, Call] = {
        key: replace(
            call,
            values=(0.0,) * (call.completion_tokens + call.observation_tokens),
            ref_logprobs=call.logprobs,
        )
        for key, call in forest.calls.items()
    }
    if getattr(config.algo, "obs", "all") != "all":
        calls = {k: replace(call, values=(0.0,) * call.completion_tokens) for k, call in calls.items()}
    # Zeros for what only a critic or a reference model would know: who is trained does not depend on them.
    frozen = [module for module, given in (config.model.modules or {}).items() if given.frozen]
    frozen += config.engine.endpoints or ()
    credit = assign_credit(replace(forest, calls=calls), config.algo, config.seed, frozen=frozen)
    return {entry.call for entry in credit.entries if any(entry.weights)}


def dry_rollouts(config: TrainCommandConfig, task: Task, reward_set: str, examples: int) -> Forest:
    """What the algorithm samples for `examples` examples, by the weights that are here."""
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
    chosen = task.examples("train")[:examples]
    modules = task.program.modules
    plans = [
        (example, _students(ALGORITHMS[algo.name].plan(algo, modules, (config.seed, 1, example.id))))
        for example in chosen
    ]
    return asyncio.run(sample(env, plans, reward_set))


def _students(trees: Sequence[Tree]) -> list[Tree]:
    """The plan with the student in the place of teachers, whose calls cost about the same."""
    return [replace(tree, teacher=None) for tree in trees]


def total(loads: Mapping[str, Load]) -> Load:
    """The sum over modules."""
    return sum(loads.values(), Load())


def unique_tokens(sequences: Iterable[tuple[int, ...]]) -> int:
    """Nodes of the prefix trie of `sequences`: tokens left when every shared prefix is counted once."""
    # Sorted, a sequence shares its longest prefix with the one before it, so the trie need not be built.
    count = 0
    before: tuple[int, ...] = ()
    for sequence in sorted(sequences):
        shared = 0
        for left, right in zip(before, sequence, strict=False):
            if left != right:
                break
            shared += 1
        count += len(sequence) - shared
        before = sequence
    return count
