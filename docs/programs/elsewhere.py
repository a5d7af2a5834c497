"""Supervised starts for environments that nobody here wrote; docs/comparison.md has their runs and commands.

Sums for the MCP server `mcp-server-calculator`; random moves of textarena's FrozenLake; random games of TRL's example
`grpo_2048.py`, a file to be put beside this one.
"""

import operator
import random

PROMPT = {"role": "system", "content": "Calculate, then answer."}
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# As the server lists it.
CALCULATE = {
    "name": "calculate",
    "description": "Calculates/evaluates the given expression.",
    "parameters": {
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
        "type": "object",
    },
}


def sums(count):
    """Make different sums of two numbers of two digits."""
    draw, records = random.Random(0), {}
    while len(records) < count:
        left, sign, right = draw.randint(10, 99), draw.choice("+-*"), draw.randint(10, 99)
        text = f"{left}{sign}{right}"
        prompt = [PROMPT, {"role": "user", "content": text}]
        records[text] = {"id": text, "prompt": prompt, "answer": str(SIGNS[sign](left, right))}
    return list(records.values())


SUMS = sums(800)
TRAIN, DEV = SUMS[:600], SUMS[600:]


def right(completions, answer, **columns):
    """Reward the right number as the last message: a reward function in TRL's form."""
    texts = [messages[-1].get("content") or "" for messages in completions]
    return [float(text.strip() == number) for text, number in zip(texts, answer, strict=True)]


def calculations():
    """Conversations that calculate a sum and answer with the result."""
    tools = [{"type": "function", "function": CALCULATE}]
    return [
        {
            "messages": [
                *record["prompt"],
                *_used("calculate", {"expression": record["id"]}, record["answer"]),
                {"role": "assistant", "content": record["answer"]},
            ],
            "tools": tools,
        }
        for record in TRAIN
    ]


def _used(name, arguments, result):
    """Return a message that calls a tool, and the result."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": result},
    ]


def walks():
    """Random moves in 150 games of FrozenLake: a conversation for each."""
    import textarena
    from textarena.agents.basic_agents import STANDARD_GAME_PROMPT

    draw, talks = random.Random(0), []
    for seed in range(10_000, 10_150):  # the task's train, dev and test games have other seeds
        random.seed(seed)
        game, done = textarena.make("FrozenLake-v0-train"), False
        game.reset(num_players=1, seed=seed)
        while not done:
            _, text = game.get_observation()
            move = draw.choice(["[up]", "[down]", "[left]", "[right]"])
            messages = [{"role": "system", "content": STANDARD_GAME_PROMPT}, {"role": "user", "content": text}]
            talks.append({"module": "player", "messages": [*messages, {"role": "assistant", "content": move}]})
            done, _ = game.step(move)
    return talks


def train_games():
    """Records of 2048, whose games draw from Python's own generator."""
    return _games("train", 400)


def dev_games():
    """Others, to evaluate on."""
    return _games("dev", 200)


def _games(split, count):
    from grpo_2048 import PROMPT as QUESTION

    return [{"id": f"{split}-{n}", "prompt": QUESTION} for n in range(count)]


def plays():
    """Games of 2048 that end after two to ten random moves."""
    from grpo_2048 import PROMPT as QUESTION
    from grpo_2048 import Game2048Env
    from transformers.utils import get_json_schema

    random.seed(0)
    talks = []
    for _ in range(400):
        game = Game2048Env()
        messages = [{"role": "user", "content": QUESTION + game.reset()}]
        for _ in range(random.randint(2, 10)):
            direction = random.choice(["up", "down", "left", "right"])
            messages += _used("move", {"direction": direction}, game.move(direction))
        messages.append({"role": "assistant", "content": "done"})
        talks.append({"messages": messages, "tools": [get_json_schema(game.move)]})
    return talks
