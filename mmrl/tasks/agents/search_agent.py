"""A search agent that thinks, searches and answers inside one growing context: the task `search_agent`.

The environment of Search-R1 with the turn-level rewards of arXiv 2505.11821 (Sec. 4 to 6 and App. C). Retrieved text
goes on inside the assistant's turn. A limit that is reached without an answer is an ordinary rollout with a badly
formed last turn, never an exception.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import ClassVar, TypedDict

from typing_extensions import override

from mmrl.config.tasks import SearchAgentConfig
from mmrl.records import Call, Example
from mmrl.tasks import metrics
from mmrl.tasks.agents.judge import JUDGE_SETS, score_by_judge
from mmrl.tasks.agents.judge import TEMPLATES as JUDGE_TEMPLATES
from mmrl.tasks.agents.rewards import SEARCH_TAGS, SearchTurn, merged_reward, search_reward
from mmrl.tasks.agents.tags import disarm, first_pair
from mmrl.tasks.agents.turns import Addition, TurnAgent, Turns, action_facts
from mmrl.tasks.base import Closing, Context, ModuleScore, Passage, Score
from mmrl.tasks.mini.examples import mini_search
from mmrl.tasks.open_qa import OpenQaTask
from mmrl.tasks.prompts import QUESTION, Prompts, Template, Templates, document_template

MODULE = "agent"
STOP = ("</search>", "</answer>")
ACTIONS = ("search", "answer")
OPEN, CLOSE = "\n\n<information>", "</information>\n\n"

TEMPLATES: Templates = {
    MODULE: {
        "system": Template("", optional=QUESTION, instructions=True),
        "user": Template(
            "Answer the question. Think first, inside <think> and </think>. To look something up, write "
            "<search> query </search>; what is found comes back inside <information> and </information>. Search as "
            "often as you need to. Then write the answer alone, such as <answer> Beijing </answer>.\n"
            "Question: {question}",
            required=QUESTION,
        ),
        "correction": Template(
            "\nThat was neither a search nor an answer. I must write a query inside <search> and </search>, or the "
            "answer inside <answer> and </answer>.\n"
        ),
        "document": document_template("Doc {index}(Title: {title}) {text}\n"),
    },
    "judge": JUDGE_TEMPLATES,
}
"""`correction` follows a turn without an action; `document` writes one retrieved document."""


def information(documents: str) -> str:
    """Return the observation that holds retrieved documents."""
    return f"{OPEN}{documents}{CLOSE}"


class SearchAgentPrediction(TypedDict):
    """Result of the search agent."""

    answer: str | None
    actions: list[str]
    """Action of each turn: `search`, `answer` or `none`."""
    queries: list[str]
    """Executed queries."""
    ended: str
    """Reason for the end: `answer`, `turns` or `context`."""


class SearchAgent(TurnAgent):
    """Implements `mmrl.tasks.base.Program`; one turn after the last search may only answer."""

    modules = (MODULE,)

    def documents(self, passages: Sequence[Passage]) -> str:
        """Format retrieved documents without anything that looks like a tag of the agent."""
        return disarm("".join(self.prompts.documents(MODULE, passages, self.snippet_words)), SEARCH_TAGS)

    async def run(self, example: Example, ctx: Context) -> SearchAgentPrediction:
        """Run turns until an answer or a limit."""
        actions: list[str] = []
        contents: list[str] = []

        async def act(turns: Turns) -> Addition | str:
            action, content = first_pair(turns.replies[-1], ACTIONS) or ("none", "")
            # A turn without an action is answered by a correction, so that the policy can recover; it costs a turn.
            actions.append(action)
            contents.append(content)
            if action == "answer":
                return "answer"
            # The last turn may only answer: it was generated, is scored, and its search is not executed.
            if len(actions) > self.searches:
                return "turns"
            if action == "none":
                # Never cut: half of it would read as text of the model.
                return Addition(self.prompts.text(MODULE, "correction"), "correction")
            passages = await self.search(ctx, example, content)
            return self.found(self.documents(passages), passages, information)

        turns = await self.play(ctx, self.question(example.inputs["question"]), STOP, act)
        executed = list(zip(actions, contents, strict=True))[: self.searches]
        return {
            "answer": contents[-1] if turns.ended == "answer" else None,
            "actions": actions,
            "queries": [content for action, content in executed if action == "search"],
            "ended": turns.ended,
        }


class SearchAgentTask(OpenQaTask, Closing):
    """Implements `mmrl.tasks.base.Task`; see `OpenQaTask` for arguments and errors."""

    templates = TEMPLATES
    config: SearchAgentConfig
    reward_sets: tuple[str, ...] = ("outcome", "turn", "merged", *JUDGE_SETS, "gain")
    failed_metrics: ClassVar[Mapping[str, float]] = dict.fromkeys(("em", "f1", "format", "retrieval", "answered"), 0.0)

    @override
    def make_program(self, prompts: Prompts) -> SearchAgent:
        return SearchAgent(prompts, self.config, self.config.max_turns - self.config.count_final_call)

    def as_asked(self, question: str) -> str:
        """Add a question mark, which NQ's questions lack: Search-R1 adds it to all of its data."""
        question = question.strip()
        return question if question.endswith("?") else f"{question}?"

    def mini_examples(self, split: str, corpus: str) -> list[Example]:
        """Return single-hop and two-hop questions."""
        return mini_search(split, corpus)

    def score(
        self, example: Example, prediction: SearchAgentPrediction, path: Sequence[Call], reward_set: str
    ) -> Score | Awaitable[Score]:
        """Score by set: `outcome` (exact match), `turn` (and intermediate rewards), `merged` (PPO-MR: one number).

        `judge_outcome` and `judge_turn` ask the judge for what `outcome` and `turn` compute; `gain` is the outcome, and
        the trainer adds turn rewards (`stages.information_gain`).
        """
        answers, answer = example.metadata["answers"], prediction["answer"] or ""
        turns = split_turns(prediction["actions"], path)
        # An empty answer would be an exact match of a gold answer that normalises to nothing ("The").
        em = self.best(metrics.exact_match, answer, example) if answer else 0.0
        reward = search_reward(turns, bool(em), answers, self.config)
        scores = {
            "em": em,
            "f1": self.best(metrics.f1, answer, example, closed=True),
            "format": float(reward.format),
            "retrieval": float(reward.retrieval),
            "searches": float(sum(turn.searches for turn in turns)),
            "turns": float(len(turns)),
            "answered": float(bool(answer)),
            **metrics.answer_shape(answer),
        }
        if reward_set in ("outcome", "gain"):
            return Score(reward=em, metrics=scores, parts={"em": em})
        if reward_set == "merged":
            merged = merged_reward(bool(em), bool(answer), reward)
            return Score(reward=merged, metrics=scores, parts={"merged": merged})
        if reward_set in JUDGE_SETS:
            prompt = self.program.question(example.inputs["question"])[-1]["content"]
            return score_by_judge(self.judge, reward_set, prompt, path, answers, scores)
        # The last call has no turn reward: its value is the final reward itself.
        turn_rewards = {call.id: value for call, value in zip(path[:-1], reward.intermediate, strict=True)}
        parts = {"final": reward.final, "intermediate": sum(reward.intermediate)}
        return Score(reward=reward.final, metrics=scores, parts=parts, turn_rewards=turn_rewards)

    @override
    def closing(self, example: Example) -> tuple[str, Sequence[str]]:
        return "<think> I can answer now. </think>\n<answer>", [f" {text}" for text in example.metadata["answers"]]

    @override
    def score_call(self, call: Call) -> ModuleScore:
        pair = first_pair(call.text, ACTIONS)
        return action_facts(pair[0] if pair else "none")


def split_turns(actions: Sequence[str], path: Sequence[Call]) -> list[SearchTurn]:
    """Return the turns of a rollout; the result of a turn's search is what the next call's prompt adds."""
    following = [call.prompt_text for call in path[1:]]
    return [
        SearchTurn(
            call.text,
            after.removeprefix(OPEN).removesuffix(CLOSE) if action == "search" and after is not None else None,
        )
        for call, action, after in zip(path, actions, [*following, None], strict=True)
    ]
