"""The task `environment`: environments and tools that others wrote, a record for each episode, and reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from mmrl.config.tasks import UNSCORED, EnvironmentConfig
from mmrl.errors import DataError, RewardFailure, gathered, refuse
from mmrl.records import Call, Example
from mmrl.system.objects import display_name
from mmrl.tasks.base import Score
from mmrl.tasks.data.rows import Row, record_id
from mmrl.tasks.dspy.own import FINISHED, OwnTask, RecordTask, as_one, imported_metrics, paths_of
from mmrl.tasks.environments.base import Source
from mmrl.tasks.environments.classes import ClassSource, FunctionSource
from mmrl.tasks.environments.episode import merged
from mmrl.tasks.environments.mcp import McpSource
from mmrl.tasks.environments.openenv import OpenEnvSource
from mmrl.tasks.environments.program import EnvironmentProgram, Played, columns
from mmrl.tasks.environments.rewards import EpisodeMetric

ROWS: Mapping[str, tuple[int, int]] = {"train": (0, 1000), "dev": (1_000_000, 100), "test": (2_000_000, 100)}
"""Split -> the first seed and the number of its records, where there are no data."""


class EnvironmentTask(RecordTask):
    """The task `environment`. Implements `mmrl.tasks.base.Task`."""

    config: EnvironmentConfig
    main_metric = "score"

    def __init__(self, config: EnvironmentConfig, seed: int):
        problems: list[str] = []
        self.worlds: dict[str, Source] = {}
        self.beside: list[Source] = []
        metrics: dict[str, EpisodeMetric] = {}
        for name, path in config.worlds.items():
            key = f"task.environment.{name}" if name else "task.environment"
            with gathered(problems):
                self.worlds[name] = self._world(config, key, path)
        for path in config.tools:
            with gathered(problems):
                mcp = path.startswith("mcp:")
                where = path.removeprefix("mcp:").strip()
                beside = (
                    McpSource("task.tools", where, config.tools_shared) if mcp else FunctionSource("task.tools", path)
                )
                self.beside.append(beside)
        with gathered(problems):
            for source, function in imported_metrics(config).items():
                metrics[source] = metric = EpisodeMetric(source, function)
                problems += filter(None, [metric.problem()])
        if not self.worlds and not self.beside and not problems:
            problems.append("task.environment: missing; expected package.module:Class, or task.tools")
        refuse([*problems, *self._name_problems(config)])
        self._functions = tuple(metrics.values())
        self._metric = as_one(metrics, config) if metrics else None
        turns = self.worlds and all(world.has_turn_rewards for world in self.worlds.values())
        self.reward_sets = ("outcome", "turn") if turns else ("outcome",)
        main = "score"
        if not metrics and not any(world.has_reward for world in self.worlds.values()):
            self.reward_sets, main = (UNSCORED,), FINISHED
        program = EnvironmentProgram(config, self.worlds, self.beside, self._judge)
        parts = OwnTask(program, self._judge, (), main_metric=main)
        super().__init__(parts, config, seed, key="task.{}".format, name="", rewards={}, extra_arguments=False)
        self.absent_features = frozenset({"penalties", "parse_failures"})

    @staticmethod
    def _world(config: EnvironmentConfig, key: str, path: str) -> Source:
        if path.startswith("openenv:"):
            where = path.removeprefix("openenv:").strip()
            return OpenEnvSource(key, where, config.environment_python, config.step_rewards)
        return ClassSource(key, path)

    def _name_problems(self, config: EnvironmentConfig) -> list[str]:
        """Return problems of names of tools: twice in one prompt, or options about one that nobody has."""
        problems = []
        for world in self.worlds.values() or [None]:
            sources = [*self.beside, *([world] if world is not None else [])]
            names = [name for source in sources for name in source.names]
            problems += [f"task.tools: two tools have the name {n}" for n in set(names) if names.count(n) > 1]
        known = merged([*self.beside, *self.worlds.values()])
        named = {
            "tools_stateless": () if config.tools_stateless == "all" else config.tools_stateless,
            "once": config.once,
        }
        problems += [
            f"task.{key}: got {name}, the tools are {', '.join(known) or 'none'}"
            for key, names in named.items()
            for name in names
            if name not in known
        ]
        return problems

    @property
    @override
    def unrepeatable(self) -> Sequence[str]:
        """See `mmrl.tasks.base.Task`; of stateless tools the recorded results stand."""
        named = self.config.tools_stateless
        once = [name for name in self.config.once if named != "all" and name not in named]
        shared = [source for source in self.beside if isinstance(source, McpSource) and source.is_shared]
        state = [name for source in shared for name in source.names if named != "all" and name not in named]
        found = [f"task.once: got {', '.join(once)}"] if once else []
        return found + ([f"task.tools_shared: got true, and {', '.join(state)} may have state"] if state else [])

    @override
    def mini(self, split: str) -> Sequence[Example]:
        first, count = ROWS[split]
        rows: list[dict[str, Any]] = [{"seed": first + n} for n in range(self.config.data.items_of(split) or count)]
        world = self.worlds.get("")
        if world is not None and world.row_problem(rows[0]):  # its episodes have no seeds
            rows = [{} for _ in rows]
        return [self._example("task.data", Row(f"record {n}", row), f"{split}-{n}") for n, row in enumerate(rows)]

    @override
    def _example(self, key: str, row: Row, number: str) -> Example:
        fields = dict(row.values) if isinstance(row.values, Mapping) else {}
        world = self.worlds.get("") or self.worlds.get(str(fields.get("environment")))
        if world is None and self.worlds:
            names = ", ".join(self.worlds)
            raise DataError(
                f"{key}: {row.where}: environment is {fields.get('environment')!r}, expected one of {names}"
            )
        if world is not None and (problem := world.row_problem(columns(fields, self.worlds))):
            raise DataError(f"{key}: {row.where}: {problem}")
        for metric in self._functions:
            if problem := metric.row_problem(fields, isinstance(world, ClassSource)):
                raise DataError(f"{key}: {row.where}: {problem}")
        if problem := _prompt_problem(fields.get("prompt", "")):
            raise DataError(f"{key}: {row.where}: {problem}")
        return Example(id=record_id(fields, "id", otherwise=number), inputs=fields, metadata=fields)

    async def _judge(self, example: Example, played: Played) -> Score:
        """Return the outcome: the environment's reward and those of the reward functions, summed as in TRL."""
        score = Score(reward=0.0)
        if self._metric is not None:
            score = await self._metric(dict(example.metadata), played)
        own = played.reward
        if own is None and not played.rewarded and self.reward_sets != (UNSCORED,):
            raise RewardFailure("no reward: neither the environment nor a reward function has given one")
        total = score.reward + (own or 0.0)
        numbers = {
            "turns": float(played.turns),
            "tool_calls": float(played.tool_calls),
            "tool_errors": float(played.tool_errors),
            "answered": float(played.ended == "answer"),
            "cut_short": float(played.ended in ("length", "turns", "context")),
        }
        parts = dict(score.parts)
        if own is not None:
            parts["environment"] = own
        numbers[self.main_metric] = 1.0 if self.main_metric == FINISHED else total
        return Score(reward=total, metrics={**score.metrics, **numbers}, parts=parts, feedback=score.feedback)

    async def score(self, example: Example, prediction: Played, path: Sequence[Call], reward_set: str) -> Score:
        """Return the outcome; the set `turn` adds the rewards of turns, that of the last one to the outcome."""
        score = prediction.score
        if reward_set != "turn":
            return score
        rewards = prediction.turn_rewards
        # A turn that was given none has none: it is no member of what rewards are compared with.
        pairs = zip(path[:-1], rewards, strict=False)
        earlier = {call.id: reward for call, reward in pairs if reward is not None}
        world = self.program.world_of(example.inputs)
        last = -sum(earlier.values()) if world.turns_add_up else rewards[len(path) - 1] or 0.0
        return Score(
            reward=score.reward + last,
            metrics=score.metrics,
            parts=score.parts,
            feedback=score.feedback,
            turn_rewards=earlier,
        )

    @override
    def describe(self) -> Mapping[str, object]:
        given = self.config.environment
        named = dict(given) if isinstance(given, Mapping) else given
        facts = {
            "environment": named,
            "tools": ", ".join(self.config.tools),
            "metric": ", ".join(paths_of(self.config)) or (UNSCORED if UNSCORED in self.reward_sets else ""),
        }
        described = {**super().describe(), **{name: display_name(str(v)) for name, v in facts.items() if v}}
        if not self.sources:
            described["data"] = "no files; a seed for each record" if self.examples("train")[0].inputs else "no files"
        return described

    @override
    def close(self) -> None:
        for source in (*self.worlds.values(), *self.beside):
            source.close()


def _only_calls(message: Mapping[str, Any]) -> bool:
    return message["content"] is None and bool(message.get("tool_calls"))


def _prompt_problem(given: object) -> str:
    """Return what is wrong with a record's prompt; empty if nothing is."""
    if isinstance(given, str):
        return ""
    whole = isinstance(given, Sequence) and bool(given) and all(isinstance(part, Mapping) for part in given)
    if whole and all({"role", "content"} <= part.keys() for part in given):  # type: ignore[attr-defined]
        if all(isinstance(part["content"], str) or _only_calls(part) for part in given):  # type: ignore[attr-defined]
            return ""
        return "prompt has a message whose content is no text; mmrl's models read text alone"
    return f"prompt is {given!r:.60}, expected a text, or messages with role and content"
