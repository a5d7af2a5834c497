"""An agent that may call a search tool once and then answers: the task `tool_agent`, two turns in the usual case.

The environment of MT-GRPO's case study (arXiv 2505.11821, App. E). A tool's result is a user message.
Whatever the model writes, the rollout ends in an answer, a second tool call or the token limit, never in an exception.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypedDict

from typing_extensions import override

from mmrl.config.tasks import ToolAgentConfig
from mmrl.records import Call, Example
from mmrl.tasks import metrics
from mmrl.tasks.agents.judge import OUTCOME, score_by_judge
from mmrl.tasks.agents.rewards import contains, tag_usage, xml_format
from mmrl.tasks.agents.tags import disarm, first_pair, fit_observation, has_word
from mmrl.tasks.base import Context, Message, ModuleScore, Passage, Score
from mmrl.tasks.mini.examples import mini_single
from mmrl.tasks.open_qa import OpenQaTask
from mmrl.tasks.prompts import QUESTION, Prompts, Shot, Template, Templates, document_template, messages

MODULE = "agent"
STOP = ("</tool>", "</answer>")
TAGS = ("reasoning", "tool", "result", "answer")
OWN_TAGS = ("reasoning", "tool", "answer")
"""Tags that the model may write."""
TOOL = "wiki_search"
TOOL_CALLS = 2
"""The rollout ends with this many tool calls; the last of them is not executed."""

TEMPLATES: Templates = {
    MODULE: {
        "system": Template(
            "You can use this tool:\n"
            "wiki_search: finds the encyclopedia article that fits best. Arguments: query\n"
            "Take these steps once:\n"
            "1. Think inside <reasoning> tags.\n"
            '2. Call the tool with JSON inside <tool> tags: {"name": "wiki_search", "args": {"query": "..."}}\n'
            "3. Its output comes inside <result> tags.\n"
            "4. Think about it inside <reasoning> tags.\n"
            "5. Write the answer alone inside <answer> tags.\n"
            "Call the tool once, even if its output does not help.",
            optional=QUESTION,
            instructions=True,
        ),
        "user": Template("{question}", required=QUESTION),
        "correction": Template("Error: no tool call or answer could be read. Check your tags."),
        "document": document_template("{title}. {text}"),
    },
    "judge": {"judge_outcome": OUTCOME},
}
"""`correction` answers a message without an action; `document` writes the article."""


def result(text: str) -> Sequence[Message]:
    """Return the user message that holds a tool's output."""
    return messages("", f"<result>{text}</result>")


def read_command(text: str) -> tuple[str | None, str]:
    """Parse a tool command into its query, or None and an error message.

    Args:
        text: content of a `<tool>` pair; should be `{"name": "wiki_search", "args": {"query": text}}`.
    """
    try:
        command = json.loads(text)
    # thousands of brackets raise RecursionError, thousands of digits ValueError; both are the model's doing
    except (ValueError, RecursionError):
        return None, "Error: the tool command is not JSON"
    if not isinstance(command, dict):
        return None, "Error: the tool command is not a JSON object"
    if not command.get("name"):
        return None, "Error: the tool command has no name"
    if command["name"] != TOOL:
        return None, f"Error: there is no such tool, only {TOOL}"
    args = command.get("args", {})
    if not isinstance(args, dict) or set(args) != {"query"} or not isinstance(args["query"], str):
        return None, f"Error: {TOOL} takes one argument, query, a text"
    if not has_word(args["query"]):
        return None, "Error: the query is empty"
    return args["query"], ""


class ToolAgentPrediction(TypedDict):
    """Result of the tool agent."""

    answer: str | None
    actions: list[str]
    """Action of each message: `tool`, `answer` or `none`."""
    succeeded: bool | None
    """True if the executed tool call worked; None: none was executed."""
    articles: int
    """Number of articles that it returned."""
    ended: str
    """Reason for the end: `answer`, `calls` or `tokens`."""


@dataclass(slots=True)
class ToolAgent:
    """Implements `mmrl.tasks.base.Program`.

    Reads `inputs["question"]` and `inputs["corpus"]`.
    """

    prompts: Prompts
    config: ToolAgentConfig
    modules: tuple[str, ...] = (MODULE,)
    continues: ClassVar[frozenset[str]] = frozenset({MODULE})

    def question(self, question: str) -> list[dict[str, str]]:
        """Return the first prompt."""
        return self.prompts.messages(MODULE, question=question)

    def articles(self, passages: Sequence[Passage]) -> str:
        """Search, and return the result without anything that looks like a tag of the agent."""
        return disarm("\n".join(self.prompts.documents(MODULE, passages)), TAGS) or "No article was found."

    async def run(self, example: Example, ctx: Context) -> ToolAgentPrediction:
        """Exchange messages until an answer, a second tool call, or the token limit."""
        actions: list[str] = []
        succeeded: bool | None = None
        articles = 0
        answer: str | None = None
        ended = "tokens"
        prompt = self.question(example.inputs["question"])
        config = self.config
        limit = min(config.max_tokens, config.max_completion)
        reply = await ctx.call(MODULE, prompt, stop=STOP, max_tokens=limit)
        # The limit counts from the end of the first prompt: observations use it up as sampled tokens do.
        end = len(reply.context) - reply.tokens + config.max_completion
        end = min(end, config.max_context or end)
        while True:
            action, content = parse_action(reply.text)
            actions.append(action)
            if action == "answer":
                answer, ended = content, "answer"
                break
            if actions.count("tool") >= TOOL_CALLS:
                ended = "calls"
                break
            # One token must be left for the next message.
            room = min(config.max_observation, end - len(reply.context) - 1)
            if action == "none":
                observation: Sequence[Message] = messages("", self.prompts.text(MODULE, "correction"))
                fits = ctx.measure(observation, after=reply) <= room
            else:
                query, output = read_command(content)
                passages: list[Passage] = []
                if query is not None:
                    passages = await ctx.tool("search", queries=[query], corpus=example.inputs["corpus"])
                    output = self.articles(passages)
                observation, fits = fit_observation(ctx, reply, output, result, room)
            if not fits:
                break
            if action == "tool":
                # of the one executed call; a command that could not be read counts as executed and failed
                succeeded, articles = query is not None, len(passages)
            budget = end - len(reply.context) - ctx.measure(observation, after=reply)
            reply = await ctx.call(
                MODULE, observation, after=reply, stop=STOP, max_tokens=min(config.max_tokens, budget)
            )
        return {"answer": answer, "actions": actions, "succeeded": succeeded, "articles": articles, "ended": ended}


def parse_action(text: str) -> tuple[str, str]:
    """Return the action of a message (`answer`, `tool` or `none`) and what its tags hold.

    An answer ends the rollout even beside a tool command: the environment reads it first.
    """
    for name in ("answer", "tool"):
        if pair := first_pair(text, (name,)):
            return pair
    return "none", ""


class ToolAgentTask(OpenQaTask):
    """Implements `mmrl.tasks.base.Task`; see `OpenQaTask` for arguments and errors."""

    templates = TEMPLATES
    config: ToolAgentConfig
    reward_sets: tuple[str, ...] = ("outcome", "turn", "judge_outcome")
    failed_metrics: ClassVar[Mapping[str, float]] = {"em": 0.0, "f1": 0.0, "answered": 0.0}

    @override
    def make_program(self, prompts: Prompts) -> ToolAgent:
        return ToolAgent(prompts, self.config)

    @override
    def shot_of(self, path: Sequence[Call], module: str) -> Shot | None:
        """Return None: a demonstration is one reply, and a rollout has two."""
        return None

    def mini_examples(self, split: str, corpus: str) -> list[Example]:
        """Return single-hop questions."""
        return mini_single(split, corpus)

    def score(
        self, example: Example, prediction: ToolAgentPrediction, path: Sequence[Call], reward_set: str
    ) -> Score | Awaitable[Score]:
        """Sum the outcome rewards; the set `turn` adds those of the tool call, if one was executed.

        `judge_outcome` asks the judge whether the answer is right. (Its turn rubric is that of the search agent.)
        """
        # The case study's accepted answers are TriviaQA's normalised aliases alone.
        answers = example.metadata.get("normalized") or example.metadata["answers"]
        answer = prediction["answer"] or ""
        texts, released = [call.text for call in path], self.config.format_rewards == "released"
        # stricter than `metrics.exact_match`: the case study's reward lower-cases and strips, nothing more
        golds = {gold.strip().lower() for gold in answers} - {""}
        outcome = {
            "answer_presence": 0.5 * contains(answer, answers),
            "exact_match": float(answer.strip().lower() in golds),
            "tag_usage": tag_usage(texts, OWN_TAGS, released=released),
            "xml_format": xml_format(texts, released=released),
        }
        # Everything sampled up to the first result is the first turn, so its last call carries the turn's reward.
        position = prediction["actions"].index("tool") if prediction["succeeded"] is not None else None
        # Both 0 where no call was executed, so that the parts of all rollouts have the same names.
        tool = {"tool_execution": 0.0, "result_answer": 0.0}
        if position is not None:
            output = path[position + 1].prompt_text.partition("<result>")[2].removesuffix("</result>")
            # An error or "No article was found." may hold the answer by chance; only an article holds it for a reason.
            retrieved = prediction["articles"] > 0 and contains(output, answers)
            tool = {"tool_execution": 0.2 * bool(prediction["succeeded"]), "result_answer": 0.5 * retrieved}
        scores = {
            "em": outcome["exact_match"],
            "f1": self.best(metrics.f1, answer, example, closed=True),
            "answered": float(bool(answer)),
            **metrics.answer_shape(answer),
            **outcome,
            **tool,
            "tool_calls": float(prediction["actions"].count("tool")),
            "turns": float(len(path)),
        }
        if reward_set == "judge_outcome":
            return score_by_judge(self.judge, reward_set, example.inputs["question"], path, answers, scores)
        parts = {
            name: value for name, value in outcome.items() if name != "xml_format" or self.config.outcome_rewards == 4
        }
        turn_rewards = {path[position].id: sum(tool.values())} if reward_set == "turn" and position is not None else {}
        return Score(reward=sum(parts.values()), metrics=scores, parts=parts, turn_rewards=turn_rewards)

    def score_call(self, call: Call) -> ModuleScore:
        """Return facts without penalty: the action of the message."""
        action, _ = parse_action(call.text)
        return ModuleScore(facts={f"action_{name}": float(action == name) for name in ("tool", "answer", "none")})
