"""How much one step asks for: calls by module, and their tokens before and after sharing.

Part of `plan`. Tokens come from dry rollouts where an engine is at hand, else from lengths declared per module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from mmrl.algorithms import ALGORITHMS
from mmrl.config import TrainCommandConfig
from mmrl.errors import ConfigError
from mmrl.rollout.plans import Tree


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
        return Load(**{name: getattr(self, name) + getattr(other, name) for name in Load.__slots__})

    def scaled(self, factor: float) -> Load:
        """`factor` times as much of everything that grows with the batch."""
        grown = {name: getattr(self, name) * factor for name in Load.__slots__ if name != "decode_steps"}
        return replace(self, **grown)


def declared(config: TrainCommandConfig, modules: Sequence[str], given: Mapping[str, Lengths]) -> dict[str, Load]:
    """Load of each module from lengths: what the algorithm's plans ask for, averaged over the draws of many examples.

    Args:
        given: lengths that the user typed, by module.
    """
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


def asked_elsewhere(loads: Mapping[str, Load], answered: Collection[str]) -> dict[str, Load]:
    """The loads with the calls of modules that an endpoint answers for, which cost these devices nothing."""
    return {module: Load(calls=load.calls) if module in answered else load for module, load in loads.items()}


def guessed(config: TrainCommandConfig, modules: Sequence[str], given: Mapping[str, Lengths]) -> list[str]:
    """Modules whose lengths nobody has declared."""
    return [m for m in modules if m not in given and m not in DECLARED.get(config.task.name, {})]


def lengths_of(config: TrainCommandConfig, modules: Sequence[str], given: Mapping[str, Lengths]) -> dict[str, Lengths]:
    """Lengths per module: typed, else declared for the task, else a guess from the task's limits.

    Raises:
        ConfigError: typed lengths for a module that the program does not have.
    """
    strange = [name for name in given if name not in modules]
    if strange:
        raise ConfigError(f"lengths: no module {', '.join(strange)}; expected some of {', '.join(modules)}")
    known = DECLARED.get(config.task.name, {})
    guess = Lengths(prompt=1000, completion=config.task.max_tokens)
    return {module: given.get(module, known.get(module, guess)) for module in modules}


def parse_lengths(text: str) -> dict[str, Lengths]:
    """`rewriter:250/30,agent:300/105/480x4` -> lengths: prompt / completion [/ observation] [x calls].

    Raises:
        ConfigError: text of another form.
    """
    found = {}
    for item in filter(None, text.split(",")):
        name, _, numbers = item.partition(":")
        sizes, _, calls = numbers.partition("x")
        parts = sizes.split("/")
        if not name or len(parts) not in (2, 3) or not all(part.isdigit() for part in [*parts, calls or "1"]):
            raise ConfigError(
                f"lengths: got '{item}', expected module:prompt/completion[/observation][xcalls], such as "
                "rewriter:250/30 or agent:300/105/480x4"
            )
        prompt, completion, observation = [*map(int, parts), 0][:3]
        found[name] = Lengths(
            prompt=prompt, completion=completion, observation=observation, calls=max(1, int(calls or 1))
        )
    return found


def _trees(
    trees: Iterable[Tree], modules: Sequence[str], lengths: Mapping[str, Lengths], config: TrainCommandConfig
) -> dict[str, Load]:
    """Load of one example."""
    found = {module: Load() for module in modules}
    seen_first = False
    for tree in trees:
        branches = Fraction(1)
        for index, module in enumerate(modules):
            prompts = branches
            for fork in tree.forks:
                if fork.module == module or (fork.module is None and index == 0):
                    branches *= fork.width
            fresh = Fraction(0) if index == 0 and seen_first else prompts
            trained = _is_trained(config, tree, module)
            found[module] = found[module] + _paths(lengths[module], float(branches), float(fresh), trained)
        seen_first = True
    return found


def _is_trained(config: TrainCommandConfig, tree: Tree, module: str) -> bool:
    """Whether calls of `module` in `tree` enter the loss."""
    algo = config.algo
    only, frozen = getattr(algo, "train_modules", None), getattr(algo, "freeze_modules", ())
    if (only is not None and module not in only) or module in frozen or module in (config.engine.endpoints or ()):
        return False
    if module in (config.model.modules or {}) and (config.model.modules or {})[module].frozen:
        return False
    return algo.name != "mhgpo_is" or tree.fork_name == module


def _paths(size: Lengths, paths: float, prompts: float, trained: bool) -> Load:
    """`paths` paths through one module that share `prompts` first prompts."""
    grown = [size.prompt + turn * (size.completion + size.observation) for turn in range(size.calls)]
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


def total(loads: Mapping[str, Load]) -> Load:
    """The sum over modules."""
    found = Load()
    for load in loads.values():
        found = found + load
    return found


def unique_tokens(sequences: Iterable[tuple[int, ...]]) -> int:
    """Nodes of the prefix trie of `sequences`: tokens left when every shared prefix is counted once."""
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
