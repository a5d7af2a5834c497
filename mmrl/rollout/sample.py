"""Sampling of one step: examples × trees of forks -> a forest. All rollouts run at once, with no barrier per module.

Called by `stages.collect` and by evaluation. A failed rollout becomes data here and nowhere else.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace

from mmrl import rng
from mmrl.config.tasks import UNSCORED
from mmrl.engines.base import Engine
from mmrl.errors import (
    LengthFailure,
    ParseFailure,
    ProgramFailure,
    RewardFailure,
    RolloutError,
    RolloutTimeout,
    Stopped,
)
from mmrl.records import EMPTY, Call, Example, Forest, Rollout, caught
from mmrl.rollout.branches import Branch, Leaf, forest_of
from mmrl.rollout.context import RolloutContext
from mmrl.rollout.counterfactuals import counterfactuals
from mmrl.rollout.environment import Environment
from mmrl.rollout.plans import Exchange, Fork, Tree
from mmrl.rollout.tape import Event
from mmrl.rollout.teachers import TeacherForcedContext
from mmrl.system.portal import on_rollout_loop
from mmrl.system.user_code import as_json, copied, finite_numbers, user_failure
from mmrl.tasks.base import RESERVED, Canonical, Described, Guarded, Program, Score


@dataclass(slots=True)
class _Tree:
    """Tree being sampled: collects the results of its branches."""

    env: Environment
    root: Branch
    reward_set: str
    keeps_tapes: bool
    rollouts: list[Leaf] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    context: Context = field(default_factory=copy_context)

    @property
    def example(self) -> Example:
        """What is played."""
        return self.root.example

    @property
    def plan(self) -> Tree:
        """Its forks, and what comes after them."""
        return self.root.plan

    def begin(self) -> None:
        """Begin its root, and the branches of forks that are on the tape."""
        tape = self.root.copied_tape()
        name: list[str | int] = [self.root.path]
        remaining = list(self.plan.forks)
        for position, event in enumerate(tape):
            if event.kind == "call":
                self._fork(name, remaining, tape[:position], event.name, event.invocation)
        self.start(tuple(name), tape, tuple(remaining))

    def start(self, path: tuple[str | int, ...], replayed: Sequence[Event], forks: Sequence[Fork]) -> None:
        """Begin one branch; it counts as live at once, so that no deterministic batch starts without it."""
        # Before the task runs: a deterministic engine waits until all that entered have a request in it.
        self.engine.enter()
        # Not in the context of who forks, which is inside of a module: DSPy keeps its settings there.
        task = asyncio.create_task(self._branch(path, replayed, forks), context=self.context.copy())
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Note the end of a branch, also of one that was cancelled before its first step."""
        self.tasks.discard(task)
        self.engine.leave()

    @property
    def engine(self) -> Engine:
        """The engine that the tree's live calls go to."""
        teacher = self.plan.teacher
        return self.env.engine if teacher is None else self.env.teachers[teacher].environment.engine

    def _fork(
        self, name: list[str | int], remaining: list[Fork], tape: Sequence[Event], module: str, invocation: int
    ) -> None:
        """Begin the other branches of forks at a call, which the branch `name` is about to make.

        Args:
            name: its path, which the forks extend.
            remaining: its forks, from which those at this call are taken.
            tape: its requests so far.
        """
        for planned in [f for f in remaining if f.module is None or (f.module, f.invocation) == (module, invocation)]:
            remaining.remove(planned)
            for branch in range(1, planned.width):
                self.start((*name, branch), tape, tuple(remaining))
            name.append(0)

    async def _branch(self, path: tuple[str | int, ...], replayed: Sequence[Event], forks: Sequence[Fork]) -> None:
        remaining = list(forks)
        name = list(path)

        def fork(ctx: RolloutContext, module: str) -> None:
            # A copy: the parent goes on and records its own events after the fork.
            self._fork(name, remaining, tuple(ctx.events), module, ctx.tape.invocation(module))
            ctx.path = _name(name)

        ctx = RolloutContext(self.env, self.example, _name(name), replayed, fork, self.root.substitutes)
        if self.plan.teacher is not None:
            ctx = await self._teacher_forced(self.plan.teacher, _name(name))
        rollout = await self._execute(ctx, self.root.program)
        # A parse failure that the program caught gets its penalty now: that it was caught is known at the end.
        ids = {call.id for call in caught(rollout, ctx.calls)}
        for event in ctx.events:
            if event.call is not None and event.call.id in ids:
                event.call = replace(event.call, penalty=self.env.settings.caught_parse_penalty)
        if self.plan.exchange is not None and rollout.reward is not None:
            outcomes, calls = await self._without_modules(self.plan.exchange, ctx)
            rollout = replace(rollout, counterfactuals=outcomes, counterfactual_calls=calls)
        kept = ctx.events if self.keeps_tapes or self.plan.growth is not None else []
        self.rollouts.append(Leaf(tuple(name), rollout, ctx.calls, kept))

    async def _without_modules(self, exchange: Exchange, ctx: RolloutContext) -> tuple[dict[str, float], int]:
        """Play the rollout without each module; returns outcomes, but where outside causes failed it, and calls."""
        outcomes, calls = {}, 0
        for module, branch in counterfactuals(exchange, ctx):
            replay = branch.context(self.env)
            rollout = await self._execute(replay, branch.program)
            calls += sum(call.id.startswith(f"{self.example.id}/{branch.path}#") for call in replay.calls)
            if rollout.reward is not None:
                outcomes[module] = rollout.reward
        return outcomes, calls

    def grow(self, number: int) -> None:
        """Begin the branches of round `number`, counted from 1; after the last one, `leaves` says which are kept."""
        growth = self.plan.growth
        if growth is None or number > growth.rounds:
            return
        # Prefix of the tape behind each node: empty at the root; at a call, all requests up to the call after it.
        prefixes: dict[str | None, Sequence[Event]] = {}
        for leaf in sorted(self.rollouts, key=lambda leaf: leaf.path):
            parent = None
            for position, event in enumerate(leaf.events):
                if event.call is not None:
                    prefixes.setdefault(parent, leaf.events[:position])
                    parent = event.call.id
        # Nodes have a call after them, so none is a leaf; a rollout that failed before its first call has no node.
        nodes, count = list(prefixes.values()), len(self.rollouts)
        draws = rng.stream(*growth.key, "growth", int(self.root.path), number)
        for branch in range(growth.nodes if nodes else 0):
            self.start((self.root.path, count + branch), draws.choice(nodes), ())

    def leaves(self) -> list[Leaf]:
        """Return the rollouts ordered by path, not by completion, so that the forest does not depend on timing."""
        leaves, growth = sorted(self.rollouts, key=lambda leaf: leaf.path), self.plan.growth
        if growth is None:
            return leaves
        selected = rng.stream(*growth.key, "kept", int(self.root.path)).sample(leaves, min(growth.keep, len(leaves)))
        return sorted(selected, key=lambda leaf: leaf.path)

    async def _teacher_forced(self, name: str, path: str) -> RolloutContext:
        """Run a teacher's program live; the context that forces its outputs on the student's program."""
        live = RolloutContext(self.env.teachers[name].environment, self.example, path)
        failure: RolloutError | None = None
        try:
            await self._run(live)
        except RolloutError as error:
            failure = error
        return TeacherForcedContext(
            env=self.env, example=self.example, path=path, teacher=name, source=live, failure=failure
        )

    async def _run(self, ctx: RolloutContext, program: Program | None = None) -> object:
        """Return the prediction of a program (None: the task's); whatever else happens is a `RolloutError`."""
        limit = self.env.settings.timeout_s
        try:
            # Of the program alone: a judge has its own limit, and its time is not the model's doing.
            async with _limited(limit, ctx.env.engine):
                # What only the score may see is not there: a program that copies it would earn every reward.
                example = _own(replace(self.example, metadata=EMPTY))
                prediction = await (program or ctx.env.task.program).run(example, ctx)
        except TimeoutError as error:
            raise RolloutTimeout(f"took longer than task.timeout_s={limit:g}") from error
        except RolloutError:
            raise
        except BaseException as error:
            if _ends_the_process(error):
                raise
            failure = user_failure(ProgramFailure, error)
            if (of_model := _of_model(ctx)) is None:
                raise failure from error
            kind, when = of_model
            laid = kind(f"{when}: {failure}")
            laid.traceback = failure.traceback
            raise laid from error
        if prediction is None and (of_model := _of_model(ctx)) is not None:
            kind, when = of_model
            raise kind(f"the program returned None {when}")
        return prediction

    async def _execute(self, ctx: RolloutContext, program: Program | None = None) -> Rollout:
        """Run a program (None: the task's) and score it; every failure comes back as a typed rollout."""
        try:
            prediction = await self._run(ctx, program)
            ctx.tape.check_played_out()
            # Before it is scored: a reward function may change the object.
            source = ctx.env.task.program
            described = as_json(source.description(prediction) if isinstance(source, Described) else prediction)
            score = await self._score(ctx, prediction)
        except RolloutError as failure:
            # A failure by infrastructure says nothing of the policy: no reward, so no credit.
            return replace(
                self._rollout(ctx, self.env.task.failure_score if failure.model_caused else None),
                error=failure.kind,
                error_message=str(failure),
                error_traceback=failure.traceback,
            )
        rollout = self._rollout(ctx, score.reward)
        metrics = {**score.metrics, **rollout.metrics}
        return replace(rollout, prediction=described, metrics=metrics, parts=score.parts, feedback=score.feedback)

    async def _score(self, ctx: RolloutContext, prediction: object) -> Score:
        with self.env.scoring.running():
            try:
                scored = self.env.task.score(_own(self.example), prediction, ctx.calls, self.reward_set)
                if inspect.isawaitable(scored):
                    # The program has ended, and its judge must hold up no batch of the programs still alive.
                    self.env.engine.leave()
                    try:
                        scored = await scored
                    finally:
                        self.env.engine.enter()
                score = _finite(scored)
            except RolloutError:
                raise
            except BaseException as error:
                if _ends_the_process(error):
                    raise
                raise user_failure(RewardFailure, error) from error
        for event in ctx.events:
            if event.call is not None and event.call.id in score.turn_rewards:
                event.call = replace(event.call, turn_reward=score.turn_rewards[event.call.id])
        return score

    def _rollout(self, ctx: RolloutContext, reward: float | None) -> Rollout:
        calls = ctx.calls
        return Rollout(
            id=f"{self.example.id}/{ctx.path}",
            example=self.example.id,
            leaf=calls[-1].id if calls else None,
            fork=self.plan.fork_name,
            teacher=self.plan.teacher,
            reward=None if self.reward_set == UNSCORED else reward,
            # Only where there are any: a rollout without the key counts as 0.
            metrics={"empty_searches": empty} if (empty := ctx.empty_searches) else EMPTY,
        )


@asynccontextmanager
async def _limited(limit: float, engine: Engine) -> AsyncIterator[None]:
    """Limit the time that a program takes while the engine of this process does not compute.

    All rollouts of a batch wait for its tokens together: on a slow machine hours, and no program's doing.

    Raises:
        TimeoutError: it took longer.
    """
    loop = asyncio.get_running_loop()
    started, computing = loop.time(), engine.computing_s
    async with asyncio.timeout(None) as clock:
        watch = loop.call_later(limit, lambda: look())

        def look() -> None:
            nonlocal watch
            remaining_s = limit - (loop.time() - started) + (engine.computing_s - computing)
            if remaining_s <= 0:
                clock.reschedule(loop.time())
            else:
                watch = loop.call_later(remaining_s, look)

        try:
            yield
        finally:
            watch.cancel()


async def sample(
    env: Environment,
    plans: Sequence[tuple[Example, Sequence[Tree]]],
    reward_set: str,
    step: int = 0,
) -> Forest:
    """Run every tree of every example concurrently and gather the forest.

    Args:
        plans: each example with the trees to sample for it.
        reward_set: which of the task's reward sets scores the rollouts.

    Returns:
        A forest whose calls and rollouts are ordered by (example, tree, branch), whatever order they finished in.
    """
    roots = [
        Branch(example=example, path=str(index), plan=plan)
        for example, planned in plans
        for index, plan in enumerate(planned)
    ]
    trees = await play(env, roots, reward_set)
    return forest_of([leaf for leaves in trees for leaf in leaves], env.task.program.modules, step)


@on_rollout_loop
async def play(
    env: Environment, roots: Sequence[Branch], reward_set: str, *, keeps_tapes: bool = False
) -> list[list[Leaf]]:
    """Run every tree concurrently, all of it on the loop of rollouts.

    Args:
        keeps_tapes: the rollouts are to be gone on from.

    Returns:
        The rollouts of each root, in the order of their paths.
    """
    program = env.task.program
    with program.guarded() if isinstance(program, Guarded) else nullcontext():
        trees = [_Tree(env, root, reward_set, keeps_tapes) for root in roots]
        for tree in trees:
            tree.begin()
        try:
            for number in range(1 + max((tree.plan.growth.rounds for tree in trees if tree.plan.growth), default=0)):
                # All trees grow at once, after the slowest rollout: what is sampled together must not depend on time.
                for tree in trees if number else ():
                    tree.grow(number)
                for tree in trees:
                    # Branches start further branches, so the set is looked at until it is empty.
                    while tree.tasks:
                        done, _ = await asyncio.wait(tree.tasks, return_when=asyncio.FIRST_EXCEPTION)
                        for task in done:
                            task.result()
        finally:
            pending = [task for tree in trees for task in tree.tasks]
            # After a failure nothing may go on: its requests would hold the engine's next batch.
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for example in dict.fromkeys(root.example.id for root in roots):
                env.engine.end_session(example)
            # The loop goes on: what an engine still does on it must not meet the trainer.
            for tree in trees:
                await tree.engine.rest()
    return [tree.leaves() for tree in trees]


def reserialised(forest: Forest, program: Canonical, encode: Callable[[str], Sequence[int]], end: int) -> Forest:
    """Return the forest with the completion of every call replaced by its canonical text.

    Training on canonical text instead of the sampled tokens (`algo.reserialise`, the released code of arXiv
    2508.04660). What the policy sampled stays in `Call.sampled_ids` and `Call.text`. Calls that could not be parsed, or
    whose text has no canonical form, keep what was sampled. The others lose their sampling log-probabilities, which
    belong to other tokens: the trainer computes its own before the first update.

    Args:
        encode: text to token ids.
        end: id of the end-of-turn token, which ends every canonical completion.
    """
    return replace(
        forest, calls={call.id: _canonical_call(call, program, encode, end) for call in forest.calls.values()}
    )


def _canonical_call(call: Call, program: Canonical, encode: Callable[[str], Sequence[int]], end: int) -> Call:
    if not call.ok:
        return call
    try:
        text = program.canonical(call)
    except ParseFailure:
        return call
    if text is None:
        return call
    # A canonical text always ends its turn, also where the sampled one was cut off.
    ids = (*encode(text), end)
    if ids == call.completion_ids:
        return call
    return replace(
        call,
        completion_ids=ids,
        completion_tokens=len(ids),
        sampled_ids=call.sampled_ids or call.completion_ids,
        logprobs=None,
    )


def _own(example: Example) -> Example:
    """Return a copy for a user's code: what it changes must reach neither other rollouts nor later steps."""
    inputs, metadata = (
        {key: copied(value) for key, value in part.items()} for part in (example.inputs, example.metadata)
    )
    return replace(example, inputs=inputs, metadata=metadata)


def _ends_the_process(error: BaseException) -> bool:
    """True for a stop and for mmrl's own cancelling; False for what user code has raised, `sys.exit()` among it."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    if isinstance(error, SystemExit):
        return error.code == Stopped.exit_code  # SIGTERM before a run listens to it
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def _of_model(ctx: RolloutContext) -> tuple[type[RolloutError], str] | None:
    """Return the kind of failure that is laid to the model, and after what, if the program had nothing to go on with.

    The program caught it, and gave up. Laid to the program, a model that never parses would be a broken program, and
    never trained. A reward that gets a prediction is to score it, whatever came before.
    """
    if ctx.unread:
        return ParseFailure, "after a reply that does not parse"
    return (LengthFailure, "after a prompt that is too long") if ctx.too_long else None


def _name(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


def _finite(score: Score) -> Score:
    """Convert the score to plain numbers.

    Raises:
        RewardFailure: one is no number, not finite or too large, or has a name that means something else.
    """
    if reserved := sorted(name for name in score.metrics if RESERVED.fullmatch(name)):
        raise RewardFailure(f"the metric names {', '.join(map(repr, reserved))} are mmrl's own; choose others")
    return Score(
        reward=finite_numbers({"reward": score.reward})["reward"],
        metrics=finite_numbers(score.metrics),
        parts=finite_numbers(score.parts),
        feedback=score.feedback,
        turn_rewards=finite_numbers(score.turn_rewards),
    )
