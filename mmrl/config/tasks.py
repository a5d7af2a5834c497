"""`task.*`: one schema per task, so that a key which has no effect with a task does not exist there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, model_validator

from mmrl.config.algo import FACTOR
from mmrl.config.base import GENERATED, MINI, SPLITS, Idle, Section, Sources, by_name, no_lookalike
from mmrl.config.endpoint import EndpointConfig, omitted
from mmrl.config.retriever import RETRIEVER_SCHEMAS, Bm25Config, RetrieverConfig


class DataConfig(Section):
    """Sources of examples: `mini` (the embedded world), files, a hub id, or a Python object.

    Where no split has any of the others, all are the mini world's; else a split without a source is absent.
    """

    train: Sources = Field(
        None,
        description="mini, a file, a folder or pattern of files, a list of these, a hub id "
        "(owner/name[:config[:split]]), or a Python list (package.module:name); null: no such split, where another "
        "has data; without any data: mini",
    )
    dev: Sources = Field(None, description="as train; the split that evaluations use by default")
    test: Sources = Field(None, description="as train")
    train_items: int | None = Field(None, ge=1, description="use only the first N after a seeded shuffle; null: all")
    dev_items: int | None = Field(None, ge=1, description="the same of dev; one subset, whatever the seed of the run")
    test_items: int | None = Field(None, ge=1, description="the same of test")

    @model_validator(mode="before")
    @classmethod
    def _all_mini(cls, raw: object) -> object:
        # Here, and not where the data are read, so that config.yaml and report say where every split came from.
        if not isinstance(raw, Mapping) or any(raw.get(split) not in (None, MINI) for split in SPLITS):
            return raw
        if nulls := [split for split in SPLITS if split in raw and raw[split] is None]:
            instead = "expected a file, a hub id or a Python list, or mini; no split has data but the mini world's"
            raise ValueError(*[f"{split}: got null, {instead}" for split in nulls])
        return {**raw, **dict.fromkeys(SPLITS, MINI)}

    def source_of(self, split: str) -> str | None:
        """Return the source of the examples of `train`, `dev` or `test`; None: there is no such split."""
        return {"train": self.train, "dev": self.dev, "test": self.test}[split]

    @property
    def files(self) -> dict[str, str]:
        """Split -> file or hub id, for the splits that have one."""
        sources = {split: self.source_of(split) for split in SPLITS}
        return {split: source for split, source in sources.items() if source is not None and source != MINI}

    def items_of(self, split: str) -> int | None:
        """Return the number of examples of a split that are used; None: all."""
        return {"train": self.train_items, "dev": self.dev_items, "test": self.test_items}[split]


class GeneratedConfig(DataConfig):
    """Examples that another package makes by seeds: the same in every run, and no two splits share one."""

    train: Literal["generated"] | None = Field(GENERATED, description="null: no such split")
    dev: Literal["generated"] | None = Field(GENERATED, description="as train")
    test: Literal["generated"] | None = Field(GENERATED, description="as train")
    train_items: int = Field(1000, ge=1, le=10**8, description="how many are made")
    dev_items: int = Field(100, ge=1, le=10**8, description="the same of dev")
    test_items: int = Field(100, ge=1, le=10**8, description="the same of test")

    @model_validator(mode="before")
    @classmethod
    def _all_mini(cls, raw: object) -> object:
        return raw  # no split is the mini world's

    @property
    def files(self) -> dict[str, str]:
        """No split has any."""
        return {}

    def items_of(self, split: str) -> int:
        """Return the number of examples of a split."""
        return {"train": self.train_items, "dev": self.dev_items, "test": self.test_items}[split]

    def seeds_of(self, split: str) -> range:
        """Return the seeds of a split, one for each example; empty where there is no such split."""
        first = SPLITS.index(split) * 10**9
        return range(first, first + self.items_of(split) * (self.source_of(split) is not None))


class JudgeEndpointConfig(EndpointConfig):
    """A language model that judges."""

    url: str = Field("http://localhost:8000/v1", description="base of the API, up to and with /v1")
    model: str = Field("openai/gpt-oss-120b", description="model name as the endpoint knows it")
    key_env: str | None = Field(None, description="environment variable with the key; null: no key is sent")
    attempts: int = Field(3, ge=1, description="tries of one HTTP request, the first one included")
    concurrency: int = Field(64, ge=1, description="requests in flight at once")
    max_tokens: int = Field(2048, ge=1, description="completion limit of a reply, reasoning included")
    temperature: float | None = Field(None, ge=0, description="null: the endpoint's own")
    retries: int = Field(2, ge=0, le=10, description="further requests after a reply that cannot be read")
    idle: ClassVar[list[Idle[Any]]] = [omitted("temperature", "temperature"), omitted("max_tokens", "max_tokens")]


class ExternalConfig(EndpointConfig):
    """The untrusted external model of `papillon`."""

    temperature: float | None = Field(None, ge=0, description="null: the endpoint's own")
    idle: ClassVar[list[Idle[Any]]] = [omitted("temperature", "temperature")]


class JudgeConfig(JudgeEndpointConfig):
    """The language model that judges agents, for which the reference has a rule where no reply can be read."""

    on_unreadable: Literal["fail", "rule"] = Field(
        "fail",
        description="after the last retry: the rollout fails and is not credited, or the fixed rule scores it: 0",
    )


PRIVILEGED = "privileged"
"""`task.reward` of any task: the trainer rewards turns (`stages.distillation`), the task's own first set outcomes."""


UNSCORED = "none"
"""Reward set of a task that has nothing to score by: its rollouts have no reward, and `algo=distill` alone trains."""


class TaskConfig(Section):
    """Settings of every task."""

    # any name: plugins add tasks, and who builds the task says which names there are
    name: str = Field(description="set by task=")
    data: DataConfig = DataConfig()
    reward: str | None = Field(
        None, description="a named reward set of the task, privileged, or none (agent); null: the algorithm's own"
    )
    privileged: Literal["sum", "mean"] = Field(
        "sum", description="a turn's reward with task.reward=privileged, over its tokens; a sum grows with length"
    )
    prompts: str | None = Field(
        None,
        description="file of prompts and demonstrations by module: YAML, DSPy's JSON, or `paper` (docs/extending.md)",
    )
    failure_score: float = Field(0.0, description="reward of a rollout whose failure the model caused")
    max_tokens: int = Field(100, ge=1, description="completion limit of a call")
    # the smallest limits only exclude what no prompt fits into
    max_context: int | None = Field(None, ge=16, description="prompt + completion limit; null: the model's")
    timeout_s: float = Field(
        600.0, gt=0, description="of one rollout, without the time in which an engine here computes"
    )


class OpenQaConfig(TaskConfig):
    """Settings of tasks that answer questions."""

    dataset: Literal["hotpotqa", "2wiki", "musique", "nq", "triviaqa", "popqa"] | None = Field(
        None, description="record layout of the data, for tasks that read several; null: the task's, else hotpotqa"
    )
    punctuation: Literal["delete", "space"] = Field(
        "delete", description="answer normalisation: as in SQuAD and HotpotQA, or punctuation to spaces (MMOA-RAG)"
    )


class CorpusConfig(TaskConfig):
    """Settings of tasks that search."""

    corpus: Sources = Field(None, description="null: the mini world's, or the paragraphs of the data files")
    retriever: Annotated[
        SerializeAsAny[RetrieverConfig], BeforeValidator(by_name(RETRIEVER_SCHEMAS, RetrieverConfig, "bm25"))
    ] = Field(Bm25Config(), description="which retriever, over which index or at which address")


class SampleConfig(TaskConfig):
    """Settings of tasks whose paper used a sample of the rows."""

    # The papers draw rows of the official files, as part of their numbers; a file of one's own is used whole.
    sample: Literal["all", "paper"] = Field("all", description="of data files, all rows, or those that the paper used")


_JUDGE = "endpoint of the reward sets judge_outcome and judge_turn, and of papillon's judges"


class JudgedConfig(TaskConfig):
    """Settings of tasks that a language model may judge."""

    judge: JudgeEndpointConfig | None = Field(None, description=_JUDGE)


class AgentJudgedConfig(JudgedConfig):
    """Settings of agents that a language model may judge."""

    judge: JudgeConfig | None = Field(None, description=_JUDGE)


class MultihopQaConfig(OpenQaConfig, CorpusConfig):
    """Three-agent search on one of three data sets (hotpotqa, 2wiki, musique)."""


class AgentConfig(OpenQaConfig, CorpusConfig):
    """Settings of agents in one context."""

    max_observation: int = Field(500, ge=16, description="what a tool adds to the context is cut to this many tokens")
    idle: ClassVar[list[Idle[Any]]] = [
        Idle(
            "retriever.dedup",
            lambda task: task.name in ("search_agent", "search_o1", "r1_searcher", "tool_agent"),
            lambda task: f"with name={task.name}: each search has one query",
        ),
        Idle(
            "retriever.snippet_words",
            lambda task: task.name == "tool_agent",
            "with name=tool_agent: articles are shown whole, up to task.max_observation",
        ),
    ]


class ReasonerConfig(AgentConfig):
    """Agents that search turn by turn (search_o1, r1_searcher)."""

    max_turns: int = Field(4, ge=1, description="turns that may search; a last one may only answer")


class SearchAgentConfig(ReasonerConfig, AgentJudgedConfig):
    """Search agent with tags, after Search-R1."""

    count_final_call: bool = Field(False, description="the last turn, which may only answer, is one of max_turns")
    search_penalty: float = Field(0.1, ge=0, description="lambda_s, per search so far, in each turn")
    final_penalty: float = Field(-1.0, le=0, description="last turn's reward when its format is wrong")
    em_needs_format: bool = Field(True, description="an exact match of wrong format earns final_penalty")
    format_check: Literal["strict", "loose"] = Field(
        "strict", description="exact sequence of tags, or only number and order of the opening ones"
    )
    retrieval_match: Literal["normalized", "case_insensitive"] = Field(
        "normalized", description="how an answer is looked for in retrieved text"
    )
    gain: Literal["probability", "logprob"] = Field(
        "probability", description="what a turn of task.reward=gain adds to: the gold answer's probability, or its log"
    )


class ToolAgentConfig(AgentConfig, AgentJudgedConfig):
    """Two-turn tool agent."""

    max_completion: int = Field(1024, ge=1, description="sampled and observation tokens of a rollout together")
    outcome_rewards: Annotated[Literal[3, 4], BeforeValidator(no_lookalike)] = Field(
        4, description="3: without the XML format reward"
    )
    format_rewards: Literal["strict", "released"] = Field(
        "strict",
        description="tag usage and XML format: nothing for a message without a whole pair, or as the authors' code",
    )


class DirectQaConfig(OpenQaConfig):
    """Answering from memory, without search."""

    chain_of_thought: bool = Field(False, description="think before the answer")


class DspyPromptConfig(TaskConfig):
    """Settings of tasks whose program is DSPy's."""

    prompt_layout: Literal["dspy", "shared_first"] = Field(
        "dspy",
        description="the adapter's reminder of the output fields: after the item, or in the system message, which all "
        "prompts of a module share",
    )


class Banking77Config(SampleConfig, DspyPromptConfig):
    """Intent classification."""

    labels: str | None = Field(None, description="JSON file with the list of labels; null: those in the data")


class PapillonConfig(SampleConfig, JudgedConfig, DspyPromptConfig):
    """Privacy-conscious delegation."""

    external: ExternalConfig | None = Field(None, description="the untrusted model; null: rules of the mini world")


class HoverConfig(SampleConfig, CorpusConfig, DspyPromptConfig):
    """Finding the documents behind a claim."""

    search_hops: int = Field(4, ge=1, description="searches, the first one for the claim itself")
    # null and not a number: the mini world's documents are looked up by name, one is enough there
    hop_top_k: int | None = Field(
        None, ge=1, description="passages per query and per hop; null: 10, in the mini world 1"
    )
    last_top_k: int | None = Field(None, ge=1, description="of the last hop, per query; null: 30, in the mini world 1")
    passages: int = Field(100, ge=1, description="passages returned and scored, at most")
    claim_hops: int | None = Field(3, description="only claims of this many hops; null: all")
    idle: ClassVar[list[Idle[Any]]] = [
        Idle(
            "retriever.top_k",
            lambda task: task.name == "hover",
            "with name=hover; use task.hop_top_k and task.last_top_k",
        ),
        Idle(
            "retriever.dedup retriever.snippet_words",
            lambda task: task.name == "hover",
            "with name=hover, which lists each passage once, in full",
        ),
    ]


def _in_names_of_files_and_metrics(names: tuple[str, ...]) -> tuple[str, ...]:
    if wrong := [name for name in names if re.fullmatch(r"\w[\w.-]*", name) is None]:
        allowed = "letters, digits, '_', '.' and '-', a letter, digit or '_' first"
        raise ValueError(f"got {', '.join(map(repr, wrong))}, expected {allowed}")
    return names


ModuleNames = Annotated[tuple[str, ...], AfterValidator(_in_names_of_files_and_metrics)]


class MetricsConfig(TaskConfig):
    """A metric of the user's, or several whose weighted sum is the reward."""

    metric: str | tuple[str, ...] | None = Field(
        None,
        description="package.module:name of (record, prediction) -> number, or a list of them, whose sum is the "
        "reward; null: an agent's result or an environment has the score, or algo=distill trains without any",
    )
    metric_weights: tuple[float, ...] = Field(
        (), description="a factor for each metric of a list, 0 for one that is only reported; []: 1 each"
    )
    idle: ClassVar[list[Idle[Any]]] = [
        Idle(
            "metric_weights",
            lambda task: not isinstance(task.metric, tuple),
            "without a list of metrics; set task.metric=[package.module:name,…]",
        )
    ]

    @model_validator(mode="after")
    def _a_weight_each(self) -> Self:
        metrics, weights = self.metric, self.metric_weights
        if metrics == ():
            raise ValueError("metric: got [], expected at least one package.module:name")
        if isinstance(metrics, tuple) and len(weights) not in (0, len(metrics)):
            raise ValueError(f"metric_weights: got {len(weights)}, expected one for each of the {len(metrics)} metrics")
        if wrong := [weight for weight in weights if abs(weight) > FACTOR]:
            raise ValueError(f"metric_weights: got {wrong[0]:g}, expected at most {FACTOR:g} in size")
        return self


class DspyProgramConfig(DspyPromptConfig, MetricsConfig):
    """A program of the user's, in DSPy or plain async code (`task=dspy`)."""

    # null in the schema, so that the task can report program, metric and inputs missing all at once
    program: str | None = Field(
        None, description="package.module:name of a dspy.Module, its factory, or an async function"
    )
    inputs: tuple[str, ...] = Field((), description="fields of a record that the program gets")
    modules: ModuleNames = Field((), description="modules of a program that is an async function")
    caught_parse_penalty: float = Field(
        0.0,
        le=0,
        ge=-FACTOR,
        description="penalty of a call that does not parse, where the program catches that; of mappo and mhgpo_*",
    )


class CallRule(Section):
    """Rule for requests of an agent that do not name their module."""

    pattern: str = Field(description="regular expression, looked for in the system message")
    module: str | None = Field(None, description="the module whose call it is; null: of none, `reply` is the answer")
    reply: str | None = Field(None, description="text in place of a call: nothing is sampled, recorded or trained")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.module is None) == (self.reply is None):
            raise ValueError("module: expected the name of a module, or a reply instead")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: got '{self.pattern}', which is no regular expression: {error}") from None
        return self


class AnyAgentConfig(MetricsConfig):
    """An agent of the user's that calls a model by HTTP (`task=agent`)."""

    # null in the schema, so that the task can report all that is missing at once
    agent: str | None = Field(
        None, description="package.module:name of a function (example, base_url, api_key) -> result, async or not"
    )
    command: str | None = Field(
        None,
        description="command line of a process for each rollout, in place of task.agent (docs/agents.md)",
    )
    inputs: tuple[str, ...] = Field((), description="fields of a record that the agent gets")
    modules: ModuleNames = Field(("agent",), description="names of its parts")
    rules: tuple[CallRule, ...] = Field((), description="requests that do not name their module; the first that fits")
    frozen: tuple[str, ...] = Field((), description="modules that act with the policy and are left out of the loss")
    client_env: bool = Field(
        False, description="give the command OPENAI_BASE_URL, ANTHROPIC_BASE_URL and their keys too"
    )
    deterministic: bool = Field(
        True, description="played again it makes the same requests; false: no algorithm that plays it again"
    )
    max_calls: int = Field(100, ge=1, description="calls of one rollout; one more ends it")
    idle_s: float = Field(
        60.0, gt=0, description="an agent that makes no request for so long no longer holds up the engine's batches"
    )


class ReasoningGymConfig(TaskConfig):
    """Generated problems of the package reasoning-gym."""

    data: GeneratedConfig = GeneratedConfig()
    dataset: str | None = Field(None, description="one of its data sets, by name (chain_sum)")
    params: dict[str, Any] = Field({}, description="its parameters, by name: task.params.max_terms=3")
    style: Literal["default", "DeepSeekZero", "simple", "direct", "chain_of_draft"] = Field(
        "default", description="which of the package's system messages; direct: without reasoning"
    )


class TextArenaConfig(TaskConfig):
    """Games of the package textarena, one of whose players learns."""

    data: GeneratedConfig = GeneratedConfig()
    game: str | None = Field(None, description="one of its games, by name (GuessTheNumber-v0)")
    params: dict[str, Any] = Field({}, description="its parameters, by name: task.params.max_turns=5")
    players: int | None = Field(None, ge=1, le=15, description="null: the fewest that the game takes")
    opponent: Literal["random", "policy"] | None = Field(
        None,
        description="the other players: random legal moves, where the game lists them (null), or the policy, whose "
        "calls as `opponent` are left out of the loss",
    )
    max_turns: int = Field(
        50, ge=1, description="moves of the player who learns; one more, and the game has no outcome"
    )
    action_timeout_s: float = Field(60.0, gt=0, description="longest time of the game for one move")

    frozen_key: ClassVar[str] = "task.opponent"
    """The option that leaves modules out of the loss."""

    @property
    def frozen(self) -> tuple[str, ...]:
        """Modules that act with the policy and are left out of the loss."""
        return ("opponent",) if self.opponent == "policy" else ()


class EnvironmentConfig(MetricsConfig):
    """An environment that others wrote, whose tools the model calls (`task=environment`)."""

    environment: str | dict[str, str] | None = Field(
        None,
        description="package.module:Class, in the form of TRL's environment_factory; openenv:URL or openenv:package; "
        "or a mapping name -> one, by the column `environment`; null: the tools alone",
    )
    environment_python: str | None = Field(
        None, description="interpreter of the server of openenv:package, where that has packages of its own"
    )
    step_rewards: Literal["last", "sum"] = Field(
        "last",
        description="reward of an OpenEnv episode: of the last step that had one, or of all, each of which is its "
        "turn's too",
    )
    tools: tuple[str, ...] = Field(
        (), description="further tools: package.module:function, mcp:COMMAND or mcp:http(s)://…, whose tools they are"
    )
    tools_stateless: tuple[str, ...] | Literal["all"] = Field(
        (),
        description="tools that a rollout which goes on from another one does not use again: their recorded results "
        "stand; all: each",
    )
    tools_shared: bool = Field(
        False,
        description="one session of each MCP server for all rollouts; those that go on from others need "
        "stateless tools then",
    )
    once: tuple[str, ...] = Field(
        (), description="tools that must not be used twice for one rollout: no algorithm that plays it again"
    )
    tool_errors: Literal["observe", "fail"] = Field(
        "observe", description="a tool that raises: the model reads the error, or the rollout fails"
    )
    max_turns: int = Field(10, ge=1, description="messages of a rollout; the tools of the last one are used still")
    max_observation: int = Field(1024, ge=16, description="what a turn's tools add to the context is cut to this")
    action_timeout_s: float = Field(60.0, gt=0, description="longest time of one action, reset or reward")
    deterministic: bool = Field(
        True,
        description="with the same record and actions it gives the same; false: no algorithm that plays it again",
    )
    idle: ClassVar[list[Idle[Any]]] = [
        Idle(
            "environment_python",
            lambda task: all("://" in path for path in task.openenv_places),
            "without task.environment=openenv:package",
        ),
        Idle("step_rewards", lambda task: not task.openenv_places, "without task.environment=openenv:…"),
        Idle(
            "tools_shared",
            lambda task: not any(path.startswith("mcp:") for path in task.tools),
            "without task.tools=[mcp:…]",
        ),
    ]

    @property
    def worlds(self) -> Mapping[str, str]:
        """Name, empty where there is one -> the environment."""
        given = self.environment
        return given if isinstance(given, Mapping) else {} if given is None else {"": given}

    @property
    def openenv_places(self) -> list[str]:
        """Addresses and packages of environments of OpenEnv."""
        return [path.removeprefix("openenv:") for path in self.worlds.values() if path.startswith("openenv:")]


# Several bases give it all keys without a copy.
class PluginTaskConfig(
    SearchAgentConfig,
    ToolAgentConfig,
    DirectQaConfig,
    Banking77Config,
    PapillonConfig,
    HoverConfig,
    DspyProgramConfig,
    AnyAgentConfig,
    EnvironmentConfig,
):
    """A task of a plugin that registers no schema: every key of the built-in tasks, any of which it may read, but for
    those whose data are generated."""


# The three data sets share a program, and the two reasoners their keys; what differs is in conf/task.
TASK_SCHEMAS: dict[str, type[TaskConfig]] = {
    "hotpotqa": MultihopQaConfig,
    "2wiki": MultihopQaConfig,
    "musique": MultihopQaConfig,
    "search_agent": SearchAgentConfig,
    "tool_agent": ToolAgentConfig,
    "qa_direct": DirectQaConfig,
    "search_o1": ReasonerConfig,
    "r1_searcher": ReasonerConfig,
    "banking77": Banking77Config,
    "papillon": PapillonConfig,
    "hover": HoverConfig,
    "dspy": DspyProgramConfig,
    "agent": AnyAgentConfig,
    "reasoning_gym": ReasoningGymConfig,
    "textarena": TextArenaConfig,
    "environment": EnvironmentConfig,
}
"""Plug point: `task.name` -> schema, `PluginTaskConfig` where a name has none. A task's values are in `conf/task/`."""
# Taken once, when nothing but mmrl can have added names.
BUILT_IN = tuple(TASK_SCHEMAS)
"""Names of mmrl's own tasks, whatever plugins add."""


def task_schema(name: str) -> type[TaskConfig]:
    """Return the schema of a task, built in or a plugin's."""
    return TASK_SCHEMAS.get(name, PluginTaskConfig)
