"""Bad input (tests/scripts/test_fuzz.py, `make fuzz`): for each target a strategy of inputs, and what reads them.

`run` returns None, or a sentence about what was wrong. An `MmrlError` is never wrong: it is what bad input should get.
"""

from __future__ import annotations

import gzip
import json
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mmrl.algorithms import ALGORITHMS
from mmrl.errors import MmrlError
from scripts.fuzz import data
from scripts.fuzz.values import JSON, spoilt, spoilt_bytes, texts

FORESTS = Path(__file__).parents[1] / "forests"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of input.

    Attributes:
        inputs: what is drawn from; made when it is first asked for, since configs and forests are read for it.
        run: what is wrong with what became of it; None for nothing. Raises `MmrlError` for input that is refused.
        limit_s: longest time for one input.
    """

    inputs: st.SearchStrategy[Any]
    run: Callable[[Any], str | None]
    limit_s: float = 5.0


def outcome(target: Target, given: Any) -> str | None:
    """What is wrong, with errors that are none of mmrl's own as one kind of it."""
    try:
        return target.run(given)
    except MmrlError as error:
        return None if str(error).strip() else "an error without words"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:200]}"


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


def run_config(raw: Any) -> str | None:
    """Validation gives a config that is its own, or refuses."""
    from mmrl.config import EvalCommandConfig, TrainCommandConfig, validate, validate_stored

    if not isinstance(raw, dict):
        return None
    schema: Any = EvalCommandConfig if "policy" in raw else TrainCommandConfig
    validated = validate(schema, raw)
    again = validate_stored(schema, validated.model_dump(mode="json"))
    return None if again == validated else "a config that is read back is another one"


FORMS = """
rewriter:300/40 a:1/2,b:3/4 : / x:1 x:1/2/3 x:-1/2 x:1e3/2 x:٣/٤ owner/name owner/name:config owner/name:config:split
mini a.jsonl ~ ~x/y \x00
"""


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


def run_forest(given: tuple[str, str]) -> str | None:
    """It is refused, or its credit is finite."""
    from mmrl.config.algo import ALGO_SCHEMAS
    from mmrl.report.forest import parse_forest
    from mmrl.run.credit import Source, credit_all, json_report, table

    written, name = given
    forest, algos = parse_forest(written, "forest.json"), [ALGO_SCHEMAS[name](name=name)]
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


@st.composite
def journals(draw: st.DrawFn) -> bytes:
    """The file of a step, damaged before or after it was compressed."""
    if draw(st.booleans()):
        return draw(spoilt_bytes(gzip.compress(_journal(), 1)))
    lines = [json.loads(line) for line in _journal().splitlines()]
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = draw(spoilt(lines[at]))
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), 1)


def run_journal(written: bytes) -> str | None:
    """`mmrl credit rollouts=` of it is refused, or reads a forest."""
    from mmrl.report.journal import load_rollouts

    load_rollouts(data.written("step-000001.jsonl.gz", written))
    return None


# -- replies of retrievers ---------------------------------------------------------------------------------------------

PASSAGE = {"document": {"id": "1", "title": "t", "text": "x", "contents": '"t"\nx'}, "score": 0.5}
RETRIEVED = (
    {"result": [[PASSAGE, PASSAGE], [PASSAGE]]},
    {"result": [[{"contents": '"t"\nx'}], []]},
    {"topk": [{"text": "t | x", "pid": 1, "rank": 1, "score": 2.0}]},
    {"error": True, "message": "no"},
    {"queries": ["a"], "topk": 3, "return_scores": True},
    {"query": "a", "k": 3},
)


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


def _configs() -> st.SearchStrategy[Any]:
    # By number: what fails is printed, and all configs in one line are no help.
    return st.integers(0, len(configs()) - 1).map(lambda number: configs()[number]).flatmap(spoilt)


def _spoilt_forests() -> st.SearchStrategy[str]:
    written = st.integers(0, len(_forests()) - 1).map(lambda number: _forests()[number]).flatmap(spoilt).map(json.dumps)
    return written | written.flatmap(lambda text: spoilt_bytes(text.encode())).map(_decoded)


def _decoded(data: bytes) -> str:
    return data.decode(errors="replace")


SPECS = st.sampled_from(FORMS.split()).map(str.encode).flatmap(spoilt_bytes).map(_decoded) | texts()
TARGETS: dict[str, Target] = {
    "config": Target(inputs=st.deferred(_configs), run=run_config),
    "spec": Target(inputs=st.tuples(st.sampled_from(("lengths", "source")), SPECS), run=run_spec),
    "forest": Target(
        inputs=st.tuples(st.deferred(_spoilt_forests), st.sampled_from(sorted(ALGORITHMS))), run=run_forest
    ),
    "journal": Target(inputs=journals(), run=run_journal),
    "data": Target(inputs=data.files(), run=data.run),
    "retriever": Target(inputs=st.sampled_from(RETRIEVED).flatmap(spoilt) | JSON, run=run_retrieved),
}
"""Name -> target. Command lines and run directories have tests of their own."""
