"""Puzzles of reasoning-gym, which makes and marks them (`pip install reasoning-gym`; no file and no hub).

`python puzzles.py letter_counting max_words=8` writes letter_counting.train.jsonl and letter_counting.dev.jsonl: 4,000
and 400 puzzles of the same generator under two seeds, the same on every machine. docs/real.md trains on them.
"""

import json
import sys

import reasoning_gym

SPLITS = {"train": (4000, 1), "dev": (400, 2)}
"""Split -> its number of puzzles and the seed of the generator."""
BRIEF = {"role": "system", "content": "Reply with the answer alone."}


async def solve(example, ctx):
    """One module: the reply is the answer."""
    question = {"role": "user", "content": example.inputs["question"]}
    return (await ctx.call("solver", [BRIEF, question])).text.strip()


async def draft_and_check(example, ctx):
    """Two modules: the second sees the first's answer and gives its own."""
    question = example.inputs["question"]
    draft = await ctx.call("solver", [BRIEF, {"role": "user", "content": question}])
    check = {"role": "user", "content": f"{question}\nSomebody answered: {draft.text.strip()}\nWhat is the answer?"}
    return (await ctx.call("checker", [BRIEF, check])).text.strip()


def metric(record, prediction):
    """The puzzle's own verifier, which may give a part of a point; `exact` counts full points."""
    score = reasoning_gym.get_score_answer_fn(record["puzzle"])(prediction, json.loads(record["entry"]))
    return {"score": score, "exact": float(score == 1)}


def main(name, *settings):
    """Write the files of a generator."""
    options = {key: int(value) for key, _, value in (setting.partition("=") for setting in settings)}
    for split, (size, seed) in SPLITS.items():
        with open(f"{name}.{split}.jsonl", "w", encoding="utf-8") as file:
            for entry in reasoning_gym.create_dataset(name, size=size, seed=seed, **options):
                record = {"question": entry["question"], "puzzle": name, "entry": json.dumps(entry)}
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
