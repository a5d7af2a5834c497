"""The task `textarena` on the package itself: outcomes, seats, opponents, replays, and draws of its own."""

import asyncio
import importlib
import random
import re
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.models.template import use
from mmrl.rng import stream
from mmrl.rollout import plans
from mmrl.tasks import TASKS
from mmrl.tasks.gym.sessions import GameSession, legal_moves
from tests.helpers.gateway import Scripted, rolled_out, tokenizer
from tests.helpers.lines import refused
from tests.helpers.programs import FakeEngine, Script, default_config, environment, forest_of, play

ta = pytest.importorskip("textarena", reason="the extra gym is not installed")

GUESS, TICTACTOE = "GuessTheNumber-v0", "TicTacToe-v0"
DATA = {"train_items": 64, "dev_items": 4, "test_items": 4}


def make(game=GUESS, **options):
    options = {"data": DATA, "max_tokens": 40} | options
    return TASKS["textarena"](default_config("textarena", game=game, **options), 0)


def answered(task, answer, examples):
    """The forest of a task whose requests are answered by `answer(prompt)`."""
    engine = FakeEngine(lambda request: answer("".join(map(chr, request.prompt_ids))), pause=lambda: 0.0)
    env = environment(task, engine)
    found = forest_of(env, examples)
    assert engine.live == 0
    return found, engine


def guess(prompt):
    """A number that depends on the prompt alone."""
    return f"[{stream(prompt).randrange(1, 21)}]"


def by_hand(seed, moves):
    """Rewards and last observation of the package's own loop."""
    env = ta.make(GUESS)
    env.reset(num_players=1, seed=seed)
    seen = []
    for move in moves:
        seen.append(env.get_observation()[1])
        if env.step(move)[0]:
            break
    return env.close()[0], seen


def test_a_game_is_played_as_by_the_packages_own_loop():
    task = make()
    for example in task.examples("train")[:8]:
        forest, engine = answered(task, guess, examples=[example])
        (rollout,) = forest.rollouts
        path = forest.path(rollout)
        rewards, seen = by_hand(example.inputs["seed"], [call.text for call in path])
        assert rollout.reward == rewards[0]
        prompts = ["".join(map(chr, call.prompt_ids)).partition("|")[2] for call in path]
        assert prompts == seen
        assert rollout.metrics["moves"] == len(path) and rollout.metrics["finished"] == 1.0
        assert {call.module for call in path} == {"player"} and len(engine.requests) == len(path)


def test_system_message_is_the_packages():
    from textarena.agents.basic_agents import STANDARD_GAME_PROMPT

    task = make()
    _, _, engine = play(task, ["[1]"], "outcome", task.examples("dev")[0])
    assert "".join(map(chr, engine.requests[0].prompt_ids)).startswith(STANDARD_GAME_PROMPT + "|")


def test_a_game_that_is_not_finished_has_no_outcome():
    task = make(max_turns=2, failure_score=-0.25, params={"max_number": 1000})
    rollout, calls, _ = play(task, ["[1]", "[2]", "[3]"], "outcome", task.examples("dev")[0])
    assert (len(calls), rollout.reward, rollout.metrics["finished"]) == (2, -0.25, 0.0)


def test_invalid_moves_are_the_models():
    task = make()
    rollout, _, _ = play(task, ["banana"], "outcome", task.examples("dev")[0])
    assert (rollout.error, rollout.metrics["invalid"]) == (None, 1.0)


def test_thoughts_are_no_part_of_a_move():
    """[0] and [4] stand in the thoughts, [8] is the move; whoever is asked next does not see them."""
    read = tokenizer("qwen3")
    use(read, thinking=True, date=None)
    reply = "<think>\nIf I take [0] he takes [4].\n</think>\n\n[8]"
    task, engine = make(TICTACTOE, opponent="policy"), Scripted(lambda prompt: reply, read)
    rolled_out(task, engine, max_tokens=120)
    assert len(engine.prompts) == 3, "the second player wants a cell that is taken, and may err once"
    assert "in cell 8" in engine.prompts[1] and "he takes" not in engine.prompts[1]


# -- several players


def test_the_other_player_draws_legal_moves_and_the_seat_is_drawn():
    task = make(TICTACTOE)
    seats = [example.inputs["seat"] for example in task.examples("train")]
    assert set(seats) == {0, 1}

    def first(prompt):
        return legal_moves(prompt)[0]

    forest, _ = answered(task, first, examples=task.examples("train")[:12])
    assert {rollout.metrics["invalid"] for rollout in forest.rollouts} == {0.0}
    outcomes = {rollout.reward for rollout in forest.rollouts}
    assert outcomes <= {-1.0, 0.0, 1.0} and len(outcomes) > 1
    for rollout in forest.rollouts:
        assert rollout.metrics["won"] == float(rollout.reward == 1.0)
        opening = "".join(map(chr, forest.path(rollout)[0].prompt_ids))
        seat = next(e for e in task.examples("train") if e.id == rollout.example).inputs["seat"]
        assert f"You are Player {seat}" in opening
        assert opening.count("[Player") == seat, "who moves second sees one move"


def test_a_game_that_the_opponent_ends_first_has_an_outcome():
    """In Indian poker of one round the other player may fold at once, who then has fewer chips."""
    task = make("IndianPoker-v0", params={"max_rounds": 1})
    engine = Scripted(lambda prompt: "[fold]", tokenizer("qwen3"))
    forest = rolled_out(task, engine, examples=task.examples("train"))
    assert {rollout.error for rollout in forest.rollouts} == {None}
    unasked = [rollout for rollout in forest.rollouts if not forest.path(rollout)]
    assert unasked and {(r.reward, r.metrics["moves"]) for r in unasked} == {(1.0, 0.0)}


def test_an_opponent_that_is_the_policy_has_a_module_out_of_the_loss():
    task = make(TICTACTOE, opponent="policy")
    assert task.program.modules == ("player", "opponent") and task.config.frozen == ("opponent",)
    forest, _ = answered(task, lambda prompt: legal_moves(prompt)[-1], examples=task.examples("train")[:4])
    for rollout in forest.rollouts:
        modules = [call.module for call in forest.path(rollout)]
        seat = next(e for e in task.examples("train") if e.id == rollout.example).inputs["seat"]
        assert modules == (["player", "opponent"] * 9)[seat : seat + len(modules)]


# -- replay


@pytest.mark.parametrize("game", [GUESS, TICTACTOE, "FrozenLake-v0-random", "Minesweeper-v0-small", "2048-v0-easy"])
def test_forks_play_the_same_game(game):
    """Each leaf's moves, made again in a game of the package alone, bring the prompts that its calls had."""
    task = make(game, max_turns=6)

    def move(request):
        prompt = "".join(map(chr, request.prompt_ids))
        moves = legal_moves(prompt) or ["[1]", "[2]", "[7]", "[20]", "[1 1]", "[0 3]", "[reveal 2 2]", "[up]", "[left]"]
        return stream(request.sampling.seed, len(prompt)).choice(moves)

    tree = plans.Tree(growth=plans.Growth(rounds=2, nodes=2, keep=9, key=(0,)))
    engine = FakeEngine(move)
    forest = forest_of(environment(task, engine), task.examples("train")[:3], [tree])
    assert {rollout.error for rollout in forest.rollouts} == {None}
    assert len(forest.calls) < sum(len(forest.path(rollout)) for rollout in forest.rollouts), "nothing is shared"
    for rollout in forest.rollouts:
        path = forest.path(rollout)
        # alone, without a fork
        example = next(e for e in task.examples("train") if e.id == rollout.example)
        alone = forest_of(environment(task, Script(answer=None, texts=[call.text for call in path])), [example])
        assert [c.prompt_ids for c in alone.path(alone.rollouts[0])] == [c.prompt_ids for c in path]
        assert alone.rollouts[0].reward == rollout.reward


def test_a_game_that_differs_when_played_again_fails_as_replay(monkeypatch):
    task, count = make(max_turns=4, params={"max_number": 1000}), iter(range(10**6))
    whole = GameSession._until_asked

    def changing(self):
        seen = whole(self)
        return type(seen)(text=f"{seen.text} {next(count)}")

    monkeypatch.setattr(GameSession, "_until_asked", changing)
    tree = plans.Tree(growth=plans.Growth(rounds=1, nodes=2, keep=9, key=(0,)))
    forest = forest_of(environment(task, FakeEngine(lambda r: "[5]")), task.examples("train")[:1], [tree])
    assert "replay" in {rollout.error for rollout in forest.rollouts}


# -- draws


def test_games_in_flight_do_not_meet_and_leave_the_global_generators_alone():
    task = make("2048-v0-easy", max_turns=8)
    examples = task.examples("train")

    def move(prompt):
        return stream(prompt).choice(["[Up]", "[Down]", "[Left]", "[Right]"])

    random.seed(11)
    np.random.seed(11)
    expected = random.random(), np.random.rand()
    random.seed(11)
    np.random.seed(11)
    together, _ = answered(task, move, examples=examples)
    assert (random.random(), np.random.rand()) == expected
    for example in examples[::9]:
        random.seed(len(example.id))
        alone, _ = answered(task, move, examples=[example])
        (mine,) = [r for r in together.rollouts if r.example == example.id]
        assert [c.prompt_ids for c in together.path(mine)] == [c.prompt_ids for c in alone.path(alone.rollouts[0])]
        assert mine.reward == alone.rollouts[0].reward


def test_splits_have_seeds_of_their_own_and_runs_have_the_same():
    task, other = make(), TASKS["textarena"](default_config("textarena", game=GUESS, data=DATA), 5)
    seeds = {split: {e.inputs["seed"] for e in task.examples(split)} for split in ("train", "dev", "test")}
    assert not seeds["train"] & seeds["dev"] and not seeds["dev"] & seeds["test"]
    assert [len(found) for found in seeds.values()] == [64, 4, 4]
    assert task.examples("dev") == other.examples("dev")


def test_a_blocked_game_fails_its_rollout(monkeypatch):
    task = make(action_timeout_s=0.2)
    monkeypatch.setattr(GameSession, "_until_asked", lambda self: time.sleep(1))
    rollout, _, _ = play(task, ["[1]"], "outcome", task.examples("dev")[0])
    assert rollout.reward is None and "took longer than task.action_timeout_s=0.2" in rollout.error_message


# -- bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "task.game: missing"),
        (["task.game=TicTacTo-v0"], "task.game: got 'TicTacTo-v0'.*did you mean 'TicTacToe-v0'"),
        (["task.params.max_num=3"], "task.params.max_num: got 'max_num'.*did you mean 'max_number'"),
        (
            ["task.params.max_number=0"],
            "task.params: GuessTheNumber-v0 cannot begin with these parameters: empty range",
        ),
        (["task.opponent=random"], "task.opponent: has no effect with GuessTheNumber-v0, which has one player"),
        (["task.players=2"], "task.players: GuessTheNumber-v0 cannot begin with 2"),
        (["task.game=TicTacToe-v0-raw"], "task.game: .*shows a list and no text; use TicTacToe-v0$"),
        (["task.game=Nim-v0"], "task.opponent: Nim-v0 lists no legal moves.*task.opponent=policy"),
        (["task.game=TicTacToe-v0", "task.opponent=policy", "algo=ppo"], "task.opponent: the critic of ppo"),
        (["task.data.dev=a.jsonl"], "task.data.dev: got 'a.jsonl', expected 'generated'"),
    ],
)
def test_bad_input_is_one_line(words, said):
    given = [] if not words or any(word.startswith("task.game") for word in words) else [f"task.game={GUESS}"]
    algo = [] if any(word.startswith("algo") for word in words) else ["algo=grpo"]
    problems = refused("task=textarena", *algo, *given, *words)
    assert len(problems) == 1 and re.search(said, problems[0]), problems


def test_games_that_need_what_is_not_there_are_refused(monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="cannot be made here: OpenRouter API key not found"):
        make("GuessWho-v0")
    monkeypatch.setenv("OPENROUTER_API_KEY", "none")
    with pytest.raises(ConfigError, match="asks a model of its own"):
        make("GuessWho-v0")
    monkeypatch.setattr("nltk.data.path", [])
    with pytest.raises(ConfigError, match=r"nltk\.downloader words"):
        make("Hangman-v0")


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"textarena; pip install 'mmrl\[gym\]'"):
        make()


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("Available Moves: '[0]', '[1]'", ["[0]", "[1]"]),
        ("Valid moves: [a1 b1]\nlater\nAvailable Moves: [a2 b2], [c]", ["[a2 b2]", "[c]"]),
        ("Your possible actions: none\nBoard [x]", []),
        ("Reply with [move].", []),
    ],
)
def test_legal_moves_are_those_of_the_last_list(text, moves):
    assert legal_moves(text) == moves


def test_asyncio_is_not_blocked_by_a_slow_first_board(monkeypatch):
    task = make()
    slow = GameSession.begin
    monkeypatch.setattr(GameSession, "begin", lambda self, seed: (time.sleep(0.3), slow(self, seed))[1])
    ticks = []

    async def both():
        async def tick():
            for _ in range(10):
                await asyncio.sleep(0.02)
                ticks.append(1)

        session = await task.source.open(cast(Any, None))  # a game needs no context
        ticking = asyncio.create_task(tick())
        await session.reset({"seed": 1, "seat": 0})
        at_once = len(ticks)
        await ticking
        await session.close()
        return at_once

    assert asyncio.run(both()) >= 5


def test_the_documented_start_is_on_the_prompts_of_rollouts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "programs"))
    walks = importlib.import_module("elsewhere").walks()
    task = make("FrozenLake-v0-train")
    session = GameSession(task.source)
    _, _, text = asyncio.run(session.reset({"seed": 10_000, "seat": 0})).partition("\n")
    asyncio.run(session.close())
    first, *_ = walks
    assert first["messages"][:-1] == list(task.all_prompts.messages("player", observation=text))
    assert {talk["messages"][-1]["content"] for talk in walks} == {"[up]", "[down]", "[left]", "[right]"}
