"""`task.*`: which data, program limits, retriever and reward set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mmrl.config.base import Section, no_lookalike
from mmrl.config.endpoint import EndpointConfig
from mmrl.config.retriever import RetrieverConfig


class DataConfig(Section):
    """Where examples come from: `mini` (the embedded world), a file path, or a hub id (`owner/name[:config]`)."""

    train: str = Field("mini", description="mini, a file, or a hub id (owner/name[:config[:split]])")
    dev: str = Field("mini", description="as train; the split that evaluations use by default")
    test: str = Field("mini", description="as train")
    train_items: int | None = Field(None, ge=1, description="use only the first N after a seeded shuffle; null: all")
    dev_items: int | None = Field(None, ge=1, description="the same of dev; one subset, whatever the seed of the run")
    test_items: int | None = Field(None, ge=1, description="the same of test")


class JudgeConfig(EndpointConfig):
    """The language model that judges agents (semantics §4.4)."""

    url: str = Field("http://localhost:8000/v1", description="base of the API, up to and with /v1")
    model: str = Field("openai/gpt-oss-120b", description="model name as the endpoint knows it")
    key_env: str | None = Field(None, description="environment variable with the key; null: no key is sent")
    attempts: int = Field(3, ge=1, description="tries of one HTTP request, the first one included")
    concurrency: int = Field(64, ge=1, description="requests in flight at once")
    max_tokens: int = Field(2048, ge=1, description="completion limit of a reply, reasoning included")
    temperature: float | None = Field(None, ge=0, description="null: the endpoint's own")
    retries: int = Field(2, ge=0, le=10, description="further requests after a reply that cannot be read")


class TaskConfig(Section):
    """One task."""

    name: str = Field(description="set by task=")
    dataset: str | None = Field(None, description="record layout of the data, for tasks that read several")
    data: DataConfig = DataConfig()
    corpus: str | None = Field(None, description="null: the mini world's, or the paragraphs of the data files")
    retriever: RetrieverConfig = RetrieverConfig()
    reward: str | None = Field(None, description="a named reward set of the task; null: the algorithm's own")
    prompts: str | None = Field(None, description="YAML file that replaces prompts, by module and role")
    punctuation: Literal["delete", "space"] = Field(
        "delete", description="answer normalisation: as in SQuAD and HotpotQA, or punctuation to spaces (MMOA-RAG)"
    )
    failure_score: float = Field(0.0, description="reward of a rollout that failed by the model's own doing")
    max_tokens: int = Field(100, ge=1, description="completion limit of a call")
    max_context: int | None = Field(None, ge=16, description="prompt + completion limit; null: the model's")
    max_observation: int = Field(
        500, ge=16, description="agents: what a tool adds to the context is cut to this many tokens"
    )
    max_turns: int = Field(4, ge=1, description="agents: turns that may search; a last one may only answer")
    count_final_call: bool = Field(False, description="search_agent: that last turn is one of max_turns")
    max_completion: int = Field(
        1024, ge=1, description="tool_agent: sampled and observation tokens of a rollout together"
    )
    search_penalty: float = Field(0.1, ge=0, description="search_agent: lambda_s, per search so far, in each turn")
    final_penalty: float = Field(-1.0, le=0, description="search_agent: last turn's reward when its format is wrong")
    em_needs_format: bool = Field(True, description="search_agent: an exact match of wrong format earns final_penalty")
    format_check: Literal["strict", "loose"] = Field(
        "strict", description="search_agent: exact sequence of tags, or only number and order of the opening ones"
    )
    retrieval_match: Literal["normalized", "case_insensitive"] = Field(
        "normalized", description="search_agent: how an answer is looked for in retrieved text"
    )
    outcome_rewards: Annotated[Literal[3, 4], BeforeValidator(no_lookalike)] = Field(
        4, description="tool_agent: 3 leaves the XML format reward out"
    )
    judge: JudgeConfig | None = Field(
        None, description="endpoint of the reward sets judge_outcome and judge_turn, and of papillon's judges"
    )
    external: EndpointConfig | None = Field(
        None, description="papillon: the untrusted external model; null: a rule-based one of the mini world"
    )
    sample: Literal["paper", "all"] = Field(
        "paper", description="banking77, papillon, hover: of data files, the rows that the paper used, or all"
    )
    chain_of_thought: bool = Field(False, description="qa_direct: think before the answer")
    program: str | None = Field(
        None, description="dspy: package.module:name of a dspy.Module, of what makes one, or of an async function"
    )
    metric: str | None = Field(None, description="dspy: package.module:name of (record, prediction) -> number")
    inputs: tuple[str, ...] = Field((), description="dspy: fields of a record that the program gets")
    modules: tuple[str, ...] = Field((), description="dspy: modules of a program that is an async function")
    search_hops: int = Field(4, ge=1, description="hover: searches, the first one for the claim itself")
    hop_top_k: int | None = Field(
        None, ge=1, description="hover: passages per query, and kept per hop; null: 10, in the mini world 1"
    )
    last_top_k: int | None = Field(
        None, ge=1, description="hover: passages per query in the last hop; null: 30, in the mini world 1"
    )
    passages: int = Field(100, ge=1, description="hover: passages returned and scored, at most")
    claim_hops: int | None = Field(3, description="hover: only claims of this many hops; null: all")
    labels: str | None = Field(
        None, description="banking77: JSON file with the list of labels; null: those that occur in the data"
    )
    timeout_s: float = Field(600.0, gt=0, description="wall-clock limit of one rollout")

    @model_validator(mode="after")
    def _options(self) -> Self:
        wrong = [
            f"task.{option}: got {getattr(self, option)}, which has no effect with task {self.name}; it is an option "
            f"of {', '.join(owners)}"
            for option, owners in OPTIONS.items()
            if self.name in BUILT_IN
            and self.name not in owners
            and getattr(self, option) != type(self).model_fields[option].default
        ]
        if wrong:
            raise ValueError(*wrong)
        return self


OPTIONS: Mapping[str, tuple[str, ...]] = {
    "max_observation": ("search_agent", "tool_agent", "search_o1", "r1_searcher"),
    "max_turns": ("search_agent", "search_o1", "r1_searcher"),
    "count_final_call": ("search_agent",),
    "max_completion": ("tool_agent",),
    "search_penalty": ("search_agent",),
    "final_penalty": ("search_agent",),
    "em_needs_format": ("search_agent",),
    "format_check": ("search_agent",),
    "retrieval_match": ("search_agent",),
    "outcome_rewards": ("tool_agent",),
    "chain_of_thought": ("qa_direct",),
    "judge": ("search_agent", "tool_agent", "papillon"),
    "external": ("papillon",),
    "sample": ("banking77", "papillon", "hover"),
    "labels": ("banking77",),
    "search_hops": ("hover",),
    "program": ("dspy",),
    "metric": ("dspy",),
    "inputs": ("dspy",),
    "modules": ("dspy",),
    "hop_top_k": ("hover",),
    "last_top_k": ("hover",),
    "passages": ("hover",),
    "claim_hops": ("hover",),
}
"""Options that only some of the built-in tasks read; a task of one's own may read any of them."""
BUILT_IN = (
    "hotpotqa",
    "2wiki",
    "musique",
    "search_agent",
    "tool_agent",
    "qa_direct",
    "search_o1",
    "r1_searcher",
    "banking77",
    "papillon",
    "hover",
    "dspy",
)
