"""The agent of the task `environment`: it calls tools as its chat template writes them, until it calls none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mmrl.config.tasks import EnvironmentConfig
from mmrl.errors import ToolFailure
from mmrl.records import Example, Reply
from mmrl.system.user_code import copied
from mmrl.tasks.agents.tags import fit_observation
from mmrl.tasks.agents.turns import CONTEXT
from mmrl.tasks.base import Context, Message, Score
from mmrl.tasks.environments.base import Observation, Session, Source
from mmrl.tasks.environments.episode import Episode, merged

MODULE = "agent"
CUT = " […]"
"""Mark at the end of an observation that was cut."""


@dataclass(slots=True)
class Played:
    """Episode that has ended, with what it was worth."""

    prompt: Sequence[Message]
    messages: list[Message] = field(default_factory=list)
    """What the model wrote and what its tools brought, as TRL has it in `completions`."""
    ids: Sequence[int] = ()
    """Tokens after the prompt: replies and observations."""
    ended: str = ""
    """`answer`: a message without a tool call; `length`: one that was cut; `done`: the environment's word; `turns`,
    `context`: no room left."""
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    turn_rewards: list[float | None] = field(default_factory=list)
    """Of each turn."""
    reward: float | None = None
    """The environment's own."""
    session: Session | None = None
    rewarded: bool = False
    """A reward function has given a number."""
    score: Score = field(default_factory=lambda: Score(reward=0.0))

    @property
    def instance(self) -> object | None:
        """The user's environment, where there is one in this process."""
        return None if self.session is None else self.session.instance

    @property
    def text(self) -> str:
        """Content of the last message that the model wrote."""
        written = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return str(written[-1]) if written else ""


Judge = Callable[[Example, Played], Awaitable[Score]]


@dataclass(frozen=True, slots=True)
class EnvironmentProgram:
    """Implements `mmrl.tasks.base.Program`; reads a record's `prompt`.

    Args:
        worlds: environments by name; one under an empty name is every record's.
        tools: sources of tools beside it.
        judge: scores an episode while its environment is there.
    """

    config: EnvironmentConfig
    worlds: Mapping[str, Source]
    tools: Sequence[Source]
    judge: Judge
    modules: ClassVar[tuple[str, ...]] = (MODULE,)
    continues: ClassVar[tuple[str, ...]] = (MODULE,)

    def world_of(self, row: Mapping[str, Any]) -> Source | None:
        """Return the environment of a record."""
        return self.worlds.get("") or self.worlds.get(str(row.get("environment")))

    @property
    def shows_tools(self) -> bool:
        """Return True if prompts have tools."""
        return any(source.tools for source in (*self.worlds.values(), *self.tools))

    async def run(self, example: Example, ctx: Context) -> Played:
        """Play an episode, and score it."""
        row = example.inputs
        world = self.world_of(row)
        # A copy of the whole record, which reward functions get: an environment may change what it is reset with.
        record = replace(example, metadata=copied(dict(example.inputs)))
        sources = [*self.tools, *([world] if world is not None else [])]
        named = self.config.tools_stateless
        episode = Episode(
            ctx,
            columns(row, self.worlds),
            world,
            merged(sources),
            lambda name: named == "all" or name in named,
            self.config.action_timeout_s,
        )
        try:
            played = await self._play(ctx, row, episode, [tool for source in sources for tool in source.tools])
            # Whatever is done again, and a judge of its own, may take long: no batch waits for it.
            ctx.leave()
            try:
                played.session = await episode.world()
                if played.session is not None:
                    played.reward = await episode.limited(played.session, played.session.reward(), "its reward")
                played.score = await self.judge(record, played)
            finally:
                ctx.enter()
            return played
        finally:
            await episode.close()

    def description(self, prediction: Played) -> object:
        """See `mmrl.tasks.base.Described`."""
        return {"text": prediction.text, "ended": prediction.ended, "reward": prediction.reward}

    async def _play(self, ctx: Context, row: Mapping[str, Any], episode: Episode, tools: Sequence[Message]) -> Played:
        said = await episode.reset()
        played = Played(prompt(row, said))
        reply = await ctx.call(MODULE, played.prompt, tools=tools)
        start = len(reply.context) - reply.tokens
        while True:
            played.turns += 1
            message, calls = written(reply)
            played.messages.append(message)
            played.turn_rewards.append(None)
            if not calls:
                played.tool_errors += isinstance(reply.parsed, Mapping) and "unread_call" in reply.parsed
                played.ended = "length" if reply.finish == "length" else "answer"
                break
            results, done, state = await self._act(episode, played, calls)
            if done or played.turns == self.config.max_turns:
                played.messages += results
                played.ended = "done" if done else "turns"
                break
            fitting = self._fitting(ctx, reply, results)
            if fitting is None:
                played.ended = "context"
                break
            played.messages += fitting
            reply = await ctx.call(MODULE, fitting, after=reply, facts={"state": state}, tools=tools)
        played.ids = reply.context[start:]
        return played

    async def _act(
        self, episode: Episode, played: Played, calls: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], bool, str]:
        """Use the tools of a turn, in order; returns messages, whether the episode is over, and the state."""
        results: list[Message] = []
        observations: list[Observation] = []
        for call in calls:
            name = call["name"]
            observation = await episode.act(name, call["arguments"])
            if observation.failed and self.config.tool_errors == "fail":
                raise ToolFailure(f"{name}: {observation.text}")
            played.tool_calls += 1
            played.tool_errors += observation.failed
            results.append({"role": "tool", "name": name, "content": observation.text})
            observations.append(observation)
            if observation.done:
                break
        if rewards := [o.turn_reward for o in observations if o.turn_reward is not None]:
            played.turn_rewards[-1] = sum(rewards) if episode.turns_add_up else rewards[-1]
        states = [o.state for o in observations if o.state is not None]
        return results, observations[-1].done, states[-1] if states else "\n".join(o.text for o in observations)

    def _fitting(self, ctx: Context, reply: Reply, results: list[Message]) -> Sequence[Message] | None:
        """Return the messages of a turn's tools, the longest ones cut where there is no room; None: not even then."""
        room = (self.config.max_context or CONTEXT) - len(reply.context) - 1
        limit = min(self.config.max_observation, room)

        def frame(text: str) -> Sequence[Message]:
            """Cut whatever is longer than `text`."""
            return [
                {**message, "content": message["content"][: len(text)] + CUT}
                if len(message["content"]) > len(text)
                else message
                for message in results
            ]

        longest = max((message["content"] for message in results), key=len)
        cut, fits = fit_observation(ctx, reply, longest, frame, limit)
        return cut if fits else None


def columns(row: Mapping[str, Any], worlds: Mapping[str, Source]) -> dict[str, Any]:
    """Return what `reset` gets of a record: all but the name of its environment."""
    return dict(row) if "" in worlds else {name: value for name, value in row.items() if name != "environment"}


def prompt(row: Mapping[str, Any], said: str) -> Sequence[Message]:
    """Return a record's prompt, with what `reset` said at the end of its last message; without one, that alone."""
    given = row.get("prompt", "")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else [dict(part) for part in given]
    for message in messages:
        message["content"] = message["content"] or ""  # null beside tool calls, in OpenAI's form
    if said:
        messages[-1]["content"] += said
    return messages


def written(reply: Reply) -> tuple[Message, list[Mapping[str, Any]]]:
    """Return the message of a reply, and the functions that it calls."""
    # Without tools in the prompt there is nothing that reads a message.
    message: Mapping[str, Any] = reply.parsed if isinstance(reply.parsed, Mapping) else {"content": reply.text}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"role": "assistant", **{name: value for name, value in message.items() if name != "unread_call"}}, calls
