"""Puzzles of reasoning-gym, which makes and marks them (`pip install reasoning-gym`; no file and no hub).

`mmrl train experiment=sums` in this folder trains on sums and differences of two numbers of one or two digits. `python
puzzles.py chain_sum min_terms=2 max_terms=2 min_digits=1 max_digits=2` writes the same puzzles, or others, into files:
chain_sum.dev.jsonl has the distinct ones of 400, chain_sum.train.jsonl those of 4,000 that are not among them, the same
on every machine. docs/real.md has results.
"""

import json
import sys
from functools import partial

import reasoning_gym

SPLITS = {"dev": (400, 1_000_001), "train": (4000, 1)}
"""Split -> its number of puzzles and their seed. reasoning-gym seeds puzzle i with seed + i, so seeds lie far apart."""
BRIEF = {"role": "system", "content": "Reply with the answer alone."}


def answer(reply):
    """Return what follows the last "=": the verifier wants the number alone, and models write equations."""
    return reply.text.rpartition("=")[2].strip()


async def solve(example, ctx):
    """Ask one module, whose reply is the answer."""
    question = {"role": "user", "content": example.inputs["question"]}
    return answer(await ctx.call("solver", [BRIEF, question]))


async def draft_and_check(example, ctx):
    """Ask two modules: the second sees the first's answer and gives its own."""
    question = example.inputs["question"]
    draft = await ctx.call("solver", [BRIEF, {"role": "user", "content": question}])
    check = {"role": "user", "content": f"{question}\nSomebody answered: {draft.text.strip()}\nWhat is the answer?"}
    return answer(await ctx.call("checker", [BRIEF, check]))


def metric(record, prediction):
    """Score by the puzzle's own verifier, which may give a part of a point; `exact` counts full points."""
    score = reasoning_gym.get_score_answer_fn(record["puzzle"])(prediction, json.loads(record["entry"]))
    return {"score": score, "exact": float(score == 1)}


def records(name, **options):
    """Return split -> records of a generator's puzzles."""
    asked, made = set(), {}
    for split, (size, seed) in SPLITS.items():
        made[split] = []
        for entry in reasoning_gym.create_dataset(name, size=size, seed=seed, **options):
            if entry["question"] in asked:
                continue
            if split == "dev":
                asked.add(entry["question"])
            made[split].append({"question": entry["question"], "puzzle": name, "entry": json.dumps(entry)})
    return made


def sums(split):
    """Return a split of the sums and differences."""
    return records("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2)[split]


train, dev = partial(sums, "train"), partial(sums, "dev")


def main(name, *settings):
    """Write the files of a generator."""
    options = {key: int(value) for key, _, value in (setting.partition("=") for setting in settings)}
    for split, rows in records(name, **options).items():
        with open(f"{name}.{split}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
