"""Bad input (tests/scripts/test_fuzz.py, `make fuzz`): each target makes an input from a random source, and runs it.

`run` returns None, or a sentence about what was wrong. An `MmrlError` is never wrong: it is what bad input should get.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from mmrl.errors import MmrlError
from scripts.fuzz import data, rewards
from scripts.fuzz.mutate import spoilt, spoilt_bytes, text, value

FORESTS = Path(__file__).parents[1] / "forests"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of input.

    Attributes:
        make: an input from a random source.
        run: what is wrong with what became of it; None for nothing. Raises `MmrlError` for input that is refused.
        limit_s: longest time for one input.
    """

    make: Callable[[Random], Any]
    run: Callable[[Any], str | None]
    limit_s: float = 5.0


def outcome(target: Target, given: Any) -> str | None:
    """What is wrong, with errors that are none of mmrl's own as one kind of it."""
    try:
        return target.run(given)
    except MmrlError as error:
        return None if str(error).strip() else "an error without words"
    except RecursionError as error:
        return f"RecursionError: {str(error)[:100]}"
    except Exception as error:
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        where = f"{last.tb_frame.f_code.co_filename.rpartition('/')[2]}:{last.tb_lineno}" if last else "?"
        return f"{type(error).__name__} at {where}: {str(error)[:200]}"


# -- configs -----------------------------------------------------------------------------------------------------------


@cache
def configs() -> tuple[Mapping[str, Any], ...]:
    """Plain mappings of right configs: every algorithm on a task that it fits, and evaluations."""
    from mmrl.cli.configs import configured, eval_configs
    from mmrl.cli.overrides import read_line

    lines = (
        *(f"algo={algo}" for algo in ("grpo", "mhgpo_rr", "mhgpo_is", "mhgpo_fof", "mhgpo_fof_os", "mappo", "mmgrpo")),
        *("algo=ppo task=tool_agent", "algo=mt_ppo task=search_agent", "algo=mt_grpo task=tool_agent"),
        *("algo=mmgrpo task=banking77", "algo=mmgrpo task=hover", "algo=grpo task=r1_searcher hardware=cpu2"),
        *("algo=grpo_mr task=tool_agent model.lora={r:8}", "algo=grpo task=search_o1 engine=vllm_server"),
    )
    trained = [configured(line.split(), None) for line in lines]
    evaluated = eval_configs(read_line(["policy=tiny"]))
    return tuple(config.model_dump(mode="json") for config in (*trained, *evaluated))


def make_config(random: Random) -> Any:
    """A right config, spoilt."""
    return spoilt(random.choice(configs()), random)


def run_config(raw: Any) -> str | None:
    """Validation gives a config that is its own, or refuses."""
    from mmrl.config import EvalCommandConfig, TrainCommandConfig, validate, validate_stored

    if not isinstance(raw, dict):
        return None
    schema: Any = EvalCommandConfig if "policy" in raw else TrainCommandConfig
    validated = validate(schema, raw)
    again = validate_stored(schema, validated.model_dump(mode="json"))
    return None if again == validated else "a config that is read back is another one"


def make_spec(random: Random) -> tuple[str, str]:
    """A typed value with a form of its own."""
    kind = random.choice(("lengths", "source", "tests"))
    forms = ("rewriter:300/40", "a:1/2,b:3/4", ":", "/", "x:1", "x:1/2/3", "x:-1/2", "x:1e3/2", "x:٣/٤", "owner/name")
    spec = random.choice(
        (*forms, "owner/name:config", "owner/name:config:split", "mini", "a.jsonl", "~", "~x/y", "\x00")
    )
    return kind, spoilt_bytes(spec.encode(), random).decode(errors="replace") if random.random() < 0.8 else text(random)


def run_spec(given: tuple[str, str]) -> str | None:
    """Lengths of a plan, and sources of data."""
    kind, spec = given
    if kind == "lengths":
        from mmrl.plan.workload import parse_lengths

        for lengths in parse_lengths(spec).values():
            if lengths.prompt < 0 or lengths.completion < 0:
                return f"negative lengths of {spec!r}"
        return None
    from mmrl.tasks.data.rows import Source

    source = Source("task.data.train", spec)
    if source.path is None:
        source.identity("train")
    return None


# -- forests, journals and credit --------------------------------------------------------------------------------------


@cache
def _forests() -> tuple[Any, ...]:
    return tuple(json.loads(path.read_text()) for path in sorted(FORESTS.glob("*.json")))


@cache
def _algorithms() -> tuple[Any, ...]:
    from mmrl.algorithms import ALGORITHMS
    from mmrl.config.algo import ALGO_SCHEMAS

    return tuple(ALGO_SCHEMAS[name](name=name) for name in ALGORITHMS)


def make_forest(random: Random) -> tuple[str, int]:
    """A forest file, spoilt, and the choice of an algorithm."""
    raw = spoilt(random.choice(_forests()), random)
    written = json.dumps(raw)
    if random.random() < 0.1:
        written = spoilt_bytes(written.encode(), random).decode(errors="replace")
    return written, random.randrange(len(_algorithms()))


def run_forest(given: tuple[str, int]) -> str | None:
    """It is refused, or its credit is finite."""
    from mmrl.report.forest import parse_forest
    from mmrl.run.credit import Source, credit_all, json_report, table

    written, choice = given
    forest, algos = parse_forest(written, "forest.json"), [_algorithms()[choice]]
    credits = credit_all(algos, Source(forest), seed=0, typed=())
    table(algos, forest, credits, width=80)
    for call in json.loads(json_report(algos, forest, credits))["calls"]:
        if not all(math.isfinite(number) for key in ("advantages", "weights") for number in call[key]):
            return f"credit of {call['id']!r} is not finite"
    return None


@cache
def _journal() -> bytes:
    from mmrl.report.forest import parse_forest
    from mmrl.report.journal import encode_step
    from mmrl.system.files import dumps

    forest = parse_forest(json.dumps(_forests()[0]), "forest.json")
    return "".join(dumps(line) + "\n" for line in encode_step(forest, ())).encode()


def make_journal(random: Random) -> bytes:
    """The file of a step, damaged before or after it was compressed."""
    if random.random() < 0.5:
        return spoilt_bytes(gzip.compress(_journal(), 1), random)
    lines = [json.loads(line) for line in _journal().splitlines()]
    at = random.randrange(len(lines))
    lines[at] = spoilt(lines[at], random)
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode("utf-8", "replace"), 1)


def run_journal(written: bytes) -> str | None:
    """`mmrl credit rollouts=` of it is refused, or reads a forest."""
    from mmrl.report.journal import load_rollouts

    load_rollouts(data.file("step-000001.jsonl.gz", written))
    return None


# -- texts of models, judges and servers -------------------------------------------------------------------------------


def make_texts(random: Random) -> list[str]:
    """A few completions."""
    return [text(random) for _ in range(random.choice((1, 1, 2, 3)))]


def run_tags(texts: list[str]) -> str | None:
    """Every parser of tags and every answer metric ends, in its range."""
    from mmrl.tasks import metrics
    from mmrl.tasks.agents import r1_searcher, search_o1, tags
    from mmrl.tasks.agents.rewards import SEARCH_TAGS, tag_usage, xml_format
    from mmrl.tasks.agents.tool_agent import OWN_TAGS, TAGS

    for one in texts:
        for names in (SEARCH_TAGS, TAGS):
            tags.first_pair(one, names)
            if tags.tag_sequence(tags.disarm(one, names), names):
                return f"a tag is left in disarmed {one[:200]!r}"
        disarmed = tags.disarm_markers(one)
        if "<|" in disarmed or "|>" in disarmed:
            return f"a marker is left in disarmed {one[:200]!r}"
        for markers in (search_o1.QUERY, r1_searcher.QUERY):
            tags.final_query(one, markers)
        if not 0 <= metrics.best(metrics.f1, one, ["the Tagus", "Lisbon"]) <= 1:
            return f"F1 of {one[:200]!r}"
    for score in (tag_usage(texts, OWN_TAGS), xml_format(texts)):
        if not 0 <= score <= 0.2 + 1e-12:
            return f"a format reward of {score}"
    return None


def make_reply(random: Random) -> tuple[str, int]:
    """A judge's reply, and the number of turns that it was asked about."""
    pieces = (
        "<score>",
        "</score>",
        "<reasoning>",
        "</reasoning>",
        "Turn1: ",
        "Turn2: ",
        "0.5",
        "-1",
        "1e999",
        "9" * 400,
    )
    reply = text(
        random, (*pieces, "nan", "inf", ".", "\n", " ", "Turn", ":", "1", "+", "١", "Turn3: 0.1\n", "x", "0x1")
    )
    if random.random() < 0.3:
        reply = f"<reasoning>{text(random, long=False)}</reasoning><score>{reply}</score>"
    return reply, random.randint(1, 3)


def run_judge(given: tuple[str, int]) -> str | None:
    """Scores are in their range, as many as turns; nothing that is judged can forge a block."""
    from mmrl.tasks.agents.judge import escape, read_outcome, read_turns, salvage_turns

    reply, count = given
    outcome_score, turns, salvaged = read_outcome(reply), read_turns(reply, count), salvage_turns(reply, count)
    if outcome_score is not None and not 0 <= outcome_score[0] <= 1:
        return f"an outcome of {outcome_score}"
    for scores in (turns, salvaged):
        if scores is not None and (len(scores) != count or not all(-1 <= score <= 1 for score in scores)):
            return f"{count} turns scored {scores}"
    return "a bracket is left" if {"<", ">"} & set(escape(reply)) else None


PASSAGE = {"document": {"id": "1", "title": "t", "text": "x", "contents": '"t"\nx'}, "score": 0.5}
REPLIES = (
    {"result": [[PASSAGE, PASSAGE], [PASSAGE]]},
    {"result": [[{"contents": '"t"\nx'}], []]},
    {"topk": [{"text": "t | x", "pid": 1, "rank": 1, "score": 2.0}]},
    {"error": True, "message": "no"},
    {"queries": ["a"], "topk": 3, "return_scores": True},
    {"query": "a", "k": 3},
)


def make_retrieved(random: Random) -> Any:
    """A retrieval server's reply, or a request to one."""
    return spoilt(random.choice(REPLIES), random) if random.random() < 0.9 else value(random)


def run_retrieved(reply: Any) -> str | None:
    """It is refused in the ways that the client knows, or gives documents of finite score."""
    from mmrl.retrieval import protocols

    for read in (
        lambda: [d for found in protocols.read_search_r1_reply(reply, 2) for d in found],
        lambda: protocols.read_dspy_reply(reply),
    ):
        try:
            documents = read()
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
        if not all(isinstance(d.text, str) and isinstance(d.id, str) and math.isfinite(d.score) for d in documents):
            return f"documents of another form: {documents!r}"
    for model in (protocols.SearchR1Request, protocols.DspyRequest):
        try:
            protocols.read_request(model, reply)
        except protocols.BadRequest:
            continue
    return None


TARGETS: dict[str, Target] = {
    "config": Target(make=make_config, run=run_config),
    "spec": Target(make=make_spec, run=run_spec),
    "forest": Target(make=make_forest, run=run_forest),
    "journal": Target(make=make_journal, run=run_journal),
    "data": Target(make=data.make, run=data.run),
    "tags": Target(make=make_texts, run=run_tags),
    "judge": Target(make=make_reply, run=run_judge),
    "rewards": Target(make=rewards.make, run=rewards.run),
    "retriever": Target(make=make_retrieved, run=run_retrieved),
}
"""Name -> target. Command lines and run directories have tests of their own."""
