"""Bad input (tests/fuzz/test_fuzz.py, `make fuzz`): for each target a strategy of inputs, and what reads them.

An `MmrlError` is never wrong: it is what bad input should get.
"""

from __future__ import annotations

import contextlib
import json
import math
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mmrl.errors import MmrlError
from tests.fuzz import data
from tests.fuzz.in_process import TooLong, time_limit
from tests.fuzz.values import JSON, spoilt, spoilt_bytes
from tests.helpers import TOP
from tests.helpers.forests import REWARDED

FORESTS = TOP / "docs" / "forests"


LIMIT_S = 5.0
"""Longest time for one input."""


def outcome(run: Callable[[Any], str | None], value: Any, limit_s: float = LIMIT_S) -> str | None:
    """Run a target on an input; what is wrong, None for nothing.

    Args:
        run: returns what is wrong with what became of an input; raises `MmrlError` for one that is refused.
    """
    try:
        with time_limit(limit_s):
            return run(value)
    except TooLong:
        return f"took longer than {limit_s:g} s"
    except MmrlError as error:
        return None if str(error).strip() else "an error without words"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:200]}"


# -- configs -----------------------------------------------------------------------------------------------------------


@cache
def configs() -> tuple[Mapping[str, Any], ...]:
    """Configs as plain mappings: every algorithm on a task that it fits, and evaluations."""
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
    """Validation refuses, or gives a config that reads back as itself."""
    from mmrl.config import EvalRunConfig, RlRunConfig, validate, validate_stored

    if not isinstance(raw, dict):
        return None
    schema: Any = EvalRunConfig if "policy" in raw else RlRunConfig
    validated = validate(schema, raw)
    again = validate_stored(schema, validated.model_dump(mode="json"))
    return None if again == validated else "a config that is read back is another one"


# -- forests and credit ------------------------------------------------------------------------------------------------


@cache
def _forests() -> tuple[Any, ...]:
    return tuple(json.loads(path.read_text()) for path in sorted(FORESTS.glob("*.json")))


def run_forest(pair: tuple[str, str]) -> str | None:
    """A forest is refused, or its credit is finite."""
    from mmrl.commands.credit import Source, credit_all, json_report, table
    from mmrl.config.algo import ALGO_SCHEMAS
    from mmrl.store.forest import parse_forest

    written, name = pair
    forest, algos = parse_forest(written, "forest.json"), [ALGO_SCHEMAS[name](name=name)]
    credits = credit_all(algos, Source(forest), seed=0, user_keys=())
    table(algos, forest, credits, width=80)
    for call in json.loads(json_report(algos, forest, credits))["calls"]:
        if not all(math.isfinite(number) for key in ("advantages", "weights") for number in call[key]):
            return f"credit of {call['id']!r} is not finite"
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
    """A reply is refused in the ways that the client knows, or gives documents of finite score."""
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
    with contextlib.suppress(protocols.BadRequest):
        protocols.read_request(reply)
    return None


def _configs() -> st.SearchStrategy[Any]:
    # By number: what fails is printed, and all configs in one line are no help.
    return st.integers(0, len(configs()) - 1).map(lambda number: configs()[number]).flatmap(spoilt)


def _spoilt_forests() -> st.SearchStrategy[str]:
    written = st.integers(0, len(_forests()) - 1).map(lambda number: _forests()[number]).flatmap(spoilt).map(json.dumps)
    return written | written.flatmap(lambda text: spoilt_bytes(text.encode())).map(lambda b: b.decode(errors="replace"))


TARGETS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], str | None]]] = {
    "config": (st.deferred(_configs), run_config),
    "forest": (st.tuples(st.deferred(_spoilt_forests), st.sampled_from(REWARDED)), run_forest),
    "data": (data.files(), data.run),
    "retriever": (st.sampled_from(RETRIEVED).flatmap(spoilt) | JSON, run_retrieved),
}
"""Name -> strategy of inputs, and what reads them. Command lines and run directories have separate tests."""
