"""The benchmarks: their arithmetic, and that each runs from start to JSON on tiny sizes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import gpu_check
from scripts.bench import __main__ as suite
from scripts.bench import common, overhead, tree_rows
from scripts.bench.common import Bar
from scripts.bench.update_shapes import GROUP, SHAPES, Dice, Row, advantages, calls, independent


@pytest.fixture(autouse=True)
def _loud() -> Any:
    """The benches silence their peers; other tests read warnings."""
    import logging
    import warnings

    with warnings.catch_warnings():
        yield
    logging.disable(logging.NOTSET)


def test_bars_are_met_from_the_right_side() -> None:
    assert [Bar("a", value, 7.0).met for value in (7.0, 6.99, math.nan)] == [True, False, False]
    assert [Bar("a", value, 0.7, at_most=True).met for value in (0.7, 0.71, math.nan)] == [True, False, False]
    assert Bar("a", 3.0).met is None


def test_a_missed_bar_is_printed_kept_and_makes_the_exit_code_1(tmp_path: Path, capsys: Any) -> None:
    good, bad, free = Bar("good", 2.0, 1.0, real=10), Bar("bad", 0.5, 1.0), Bar("free", 0.1)
    assert common.finish("x", [good, free], str(tmp_path / "a.json")) == 0
    assert "MISSED" not in capsys.readouterr().out
    assert common.finish("x", [good, bad], str(tmp_path / "b.json"), note=3) == 1
    printed = capsys.readouterr().out
    assert "MISSED" in printed and "bars missed: bad" in printed
    kept = json.loads((tmp_path / "b.json").read_text())
    assert kept["missed"] == ["bad"] and kept["note"] == 3
    assert [(bar["what"], bar["met"]) for bar in kept["bars"]] == [("good", True), ("bad", False)]
    assert {"cpu", "versions", "threads", "load", "started"} <= kept.keys()


def test_the_table_has_a_column_of_tokens_where_a_bar_has_them() -> None:
    assert "padded" not in common.table([Bar("a", 1.0, 2.0)])
    header, with_tokens, without = common.table(
        [Bar("a", 1.0, padded=90, real=60, unique=20, tree_row=21, copied_keys=55), Bar("b", 1.0)]
    ).splitlines()[:3]
    assert header.split()[3:] == ["padded", "real", "unique", "padded/unique", "TreeRow", "its", "copied", "keys"]
    assert with_tokens.split() == ["a", "1x", "90", "60", "20", "4.50", "21", "55"]
    assert without.split() == ["b", "1x"]


def test_cosine_of_all_parameters_together() -> None:
    one = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0])}
    two = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0])}
    assert common.cosine(one, one) == pytest.approx(1)
    assert common.cosine(one, two) == pytest.approx(1 / math.sqrt(2))
    assert math.isnan(common.cosine(one, {n: torch.zeros_like(t) for n, t in one.items()}))
    with pytest.raises(SystemExit, match="different parameters"):
        common.cosine(one, {"a": one["a"]})


def test_share_of_a_step() -> None:
    steps = [{"time/step": 3.0, "time/overhead": 0.1}, {"time/step": 1.0, "time/overhead": 0.1, "time/x": 2.0}]
    assert overhead.share(steps, "overhead") == pytest.approx(5)
    assert overhead.share(steps, "x") == pytest.approx(50)
    with pytest.raises(SystemExit, match="no timed step"):
        overhead.share([{"eval/f1": 1.0}], "overhead")


@pytest.mark.parametrize(
    ("bench", "arguments", "bars"),
    [
        ("rollout", ["model=test", "repeats=1"], 2),
        ("rollout", ["model=test", "repeats=1", "brief=1"], 2),
        ("update", ["model=test", "repeats=1", "shape=fof", "micro=4", "groups=1"], 3),
        ("update", ["model=test", "repeats=1", "shape=is", "micro=8"], 3),
        pytest.param(
            *("update", ["model=hybrid", "repeats=1", "shape=fof", "micro=4", "groups=1"], 3), marks=pytest.mark.slow
        ),
        ("step", ["model=test", "steps=1", "micro=4"], 2),
        ("gateway", ["agents=4", "calls=5"], 3),
        ("environment", ["instances=4", "calls=5"], 5),
        pytest.param(
            *("fleet", ["servers=1,2", "latency_ms=20", "rounds=2"], 4),
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(find_spec("vllm_router") is None, reason="needs vllm-router"),
            ],
        ),
    ],
)
def test_every_bench_runs_to_its_json(bench: str, arguments: list[str], bars: int, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    code = suite.main([bench, *arguments, f"out={out}"])
    found = json.loads(out.read_text())
    assert len(found["bars"]) == bars
    assert code == int(bool(found["missed"]))
    assert all(math.isfinite(bar["value"]) for bar in found["bars"])


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["model=8B"], "expected some of 1M,smollm2_135m,hybrid"),
        (["model=smollm2_135m", "only=step"], "expected some of update,rollout"),
        (["only=stpe"], "expected some of update,step"),
        (["onyl=step"], "unknown option onyl"),
        (["step", "onyl=step"], "unknown option onyl"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], refusal: str) -> None:
    with pytest.raises(SystemExit, match=refusal):
        suite.main(arguments)


def test_the_suite_counts_a_bench_that_failed(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    good = asdict(Bar("good", 2.0, 1.0)) | {"met": True}
    answers = {
        "rollout": {"bench": "rollout", "bars": [good]},
        "step": {"bench": "step", "bars": [], "error": "it broke"},
    }
    monkeypatch.setattr(suite, "result_of", lambda bench, arguments, folder: answers[bench])
    assert suite.main(["only=rollout", f"out={tmp_path / 'a.json'}"]) == 0
    assert suite.main(["only=rollout,step", f"out={tmp_path / 'b.json'}"]) == 1
    assert "it broke" in capsys.readouterr().err
    assert json.loads((tmp_path / "b.json").read_text())["missed"] == ["step: FAILED, see above"]


def test_gpu_check_runs_end_to_end_on_the_cpu(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.main(["device=cpu", "tiny=1", "repeats=1"]) == 0
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(found["parts"]) == 5
    for name, part in found["parts"].items():
        assert part["max_logprob_difference"] < 1e-4 and part["cosine_padded"] > 0.9999
        assert (part["tokens"]["unique"] < part["tokens"]["real"] * 0.7) == name.endswith("is")
        assert part["seconds"] > 0 and 0 < part["mfu_percent"] < 100
        if name.endswith("long"):
            continue
        assert part["cosine_trl"] > 0.9999 and part["trl_seconds"] > 0
        # AsyncGRPOTrainer packs the same trie, but forks a token early, forwards last tokens, and copies keys.
        assert part["cosine_tree_row"] > 0.9999 and part["tree_row_seconds"] > 0
        assert part["tokens"]["unique"] < part["tokens"]["tree_row"] <= part["tokens"]["copied_keys"]


def test_the_card_is_the_second_denominator(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(gpu_check.CARDS, "cpu", 1e12)
    out = tmp_path / "x.json"
    assert gpu_check.main(["device=cpu", "tiny=1", "repeats=1", "only=long", f"out={out}"]) == 0
    found = json.loads(out.read_text())
    (part,) = found["parts"].values()
    assert part["card_percent"] * 1e12 == pytest.approx(part["mfu_percent"] * found["product_flops"])
    assert part["mfu_percent"] == pytest.approx(100 * part["work_flops"] / part["seconds"] / found["product_flops"])


def test_tree_rows_count_what_trl_forwards_and_copies() -> None:
    shared = [Row((2, 3, 4), ((5, 6),), 0.0), Row((2, 3, 4), ((5, 7),), 1.0)]
    alone = [Row((8, 9), ((10,),), 0.0), Row((11,), ((12,), (13, 14), (15,)), 1.0)]
    # A token is keyed on the next one: 2 3 4 are shared, and 5, before the fork, is not. Paths of 3, 5, 5; 3; 5.
    assert tree_rows.counts([*shared, *alone], 100) == {"tree_row": 7 + 3 + 5, "copied_keys": 13 + 3 + 5}
    # Of five tokens to a row, each rollout is alone, and none is dropped though one budget is shorter.
    assert tree_rows.counts([*shared, *alone], 3) == {"tree_row": 18, "copied_keys": 18}


def test_tree_rows_are_not_counted_without_trls_planner(monkeypatch: Any) -> None:
    monkeypatch.setattr(tree_rows, "PLACES", ("trl.moved_elsewhere", "trl.trainer"))
    assert tree_rows.counts([Row((2,), ((3,),), 0.0)] * 4, 8) == {}


def test_tries_of_rollouts_count_each_query_and_key_once() -> None:
    rows = independent(Dice(10**6), 1, (7, 7), (4, 4))
    # 7 + 4 × 4 tokens, 28 pairs of the prompt, 38 of a completion.
    sequences = [row.prompt + row.completion for row in rows]
    assert gpu_check.trie_pairs(sequences) == (23, 28 + 4 * 38)
    assert gpu_check.trie_pairs(sequences[:1]) == (11, 66)


def test_gpu_check_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu_check.main([])


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_hold_the_same_tokens_for_every_side(name: str) -> None:
    rows = SHAPES[name](Dice(2048))
    made = calls(rows)
    assert len(rows) % 8 == 0
    assert rows == SHAPES[name](Dice(2048))
    assert sum(len(train.call.completion_ids) for train in made) == sum(sum(row.mask) for row in rows)
    last = {train.call.id.split(".")[0]: train.call.prompt_ids + train.call.completion_ids for train in made}
    assert list(last.values()) == [row.prompt + row.completion for row in rows]
    assert sum(weight for call in made for entry in call.entries for weight in entry.weights) == pytest.approx(1)


def test_shapes_share_what_their_algorithm_shares() -> None:
    prompts = {name: len({row.prompt for row in SHAPES[name](Dice(2048))}) for name in SHAPES}
    assert prompts == {
        "is": 8, "fof": 32, "fof_converged": 8, "fof_os": 16, "rr": 26, "hover": 32, "search": 4, "long": 4,
        "demonstrations": 4,
    }  # fmt: skip


def test_advantages_are_normalised_per_group() -> None:
    found = advantages(SHAPES["is"](Dice(2048)))
    for start in range(0, len(found), GROUP):
        assert sum(found[start : start + GROUP]) == pytest.approx(0, abs=1e-9)
