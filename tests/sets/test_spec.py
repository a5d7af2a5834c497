"""conf/set: the papers' facts, stated once each, and what a wrong file is told."""

import functools
import gzip
import json
import os
import re
from pathlib import Path
from statistics import fmean

import pytest

from mmrl.cli import main
from mmrl.cli.configs import set_config
from mmrl.config import ALGO_SCHEMAS
from mmrl.config.base import SHIPPED
from mmrl.config.validate import as_tuples, explain
from mmrl.errors import ConfigError
from mmrl.sets.spec import Cell, SetSpec
from mmrl.sets.words import read_set, scales_of, set_names, words_of

CONF = Path(__file__).parents[2] / "conf"
PAPERS = Path(os.environ.get("MMRL_PAPERS", CONF.parent.parent / "shared" / "papers"))
"""The papers' texts, which are not part of this repository."""
P0, P1, P2 = "arXiv 2508.04660", "arXiv 2506.02718", "arXiv 2505.11821"

TABLES = [name for name in set_names() if read_set(name).source is not None]

# (table, row, column, command) -> key -> value, place in the paper or the official code.
FACTS = {
    ("mmgrpo-table1", "mmGRPO", "Banking77 qwen3", "train"): {
        "train.steps": (750, f"{P0} Sec. 5.2"),
        "train.batch_size": (4, f"{P0} Sec. 5.2"),
        "algo.rollouts": (12, f"{P0} Sec. 5.2"),
        "train.lr": (1e-5, f"{P0} Sec. 5.2"),
        "algo.beta": (0.01, f"{P0} Sec. 5.2, Qwen3"),
        "train.grad_clip": (0.1, f"{P0} Sec. 5.2, Qwen3"),
        "algo.temperature": (0.6, f"{P0} Sec. 5.2"),
        "algo.max_context": (8192, f"{P0} Sec. 5.2"),
        "task.max_tokens": (1032, f"{P0} Sec. 5.2"),
        "task.max_context": (32768, f"{P0} Sec. 5.2"),
        "eval.temperature": (0.6, f"{P0} Sec. 5.1"),
        "eval.top_p": (0.95, f"{P0} Sec. 5.1, Qwen3"),
        "eval.top_k": (20, f"{P0} Sec. 5.1, Qwen3"),
        "eval.parse_retries": (3, f"{P0} Sec. 5.1"),
        "model.lora.r": (16, f"{P0} Sec. 5.2"),
        "model.lora.alpha": (64, f"{P0} Sec. 5.2"),
        "model.lora.dropout": (0.05, f"{P0} Sec. 5.2"),
        # 4 examples x 12 rollouts in steps of 20 samples: 2.4, and mini-batches hold whole examples
        "algo.minibatches": (2, f"{P0} Sec. 5.2: accumulation 20, one sample per device"),
        "hardware.processes": (2, f"{P0} Sec. 5.3: 2 H100"),
    },
    ("mmgrpo-table1", "mmGRPO", "HoVer llama3.1", "train"): {
        "algo.beta": (0.04, f"{P0} Sec. 5.2, Llama"),
        "train.grad_clip": (0.5, f"{P0} Sec. 5.2, Llama"),
        "eval.top_p": (0.9, f"{P0} Sec. 5.1, Llama"),
        "eval.top_k": (0, f"{P0} Sec. 5.1, Llama"),
        "algo.minibatches": (4, f"{P0} Sec. 5.2"),
        "task.hop_top_k": (10, f"{P0} snippet 3"),
        "task.last_top_k": (30, f"{P0} snippet 3"),
        "task.passages": (100, f"{P0} App. D: Recall@100"),
        "task.search_hops": (4, f"{P0} snippet 3"),
        "task.retriever.name": ("remote", f"{P0} App. D: ColBERTv2, a server"),
        "task.retriever.protocol": ("dspy", f"{P0} App. D: ColBERTv2, a server"),
        "task.data.train": ("hover_train_release_v1.1.json", "hover-nlp/hover: the hub has a loading script alone"),
    },
    ("mmgrpo-table1", "BetterTogether", "PAPILLON llama3.1", "train"): {
        "algo.name": ("mmgrpo", f"{P0} Sec. 5.2: from the prompts of MIPROv2"),
        "algo.beta": (0.04, f"{P0} Sec. 5.2, Llama"),
        "train.grad_clip": (0.5, f"{P0} Sec. 5.2, Llama"),
        "algo.minibatches": (4, f"{P0} Sec. 5.2"),
        "task.external.model": ("gpt-4.1-mini-2025-04-14", f"{P0} App. D"),
        "task.judge.model": ("gpt-4.1-mini-2025-04-14", "gepa-ai/gepa-artifact"),
    },
    ("mmgrpo-table1", "MIPROv2", "Banking77 qwen3", "train"): {
        "algo.auto": ("medium", f"{P0} Sec. 5.2"),
        "hardware.processes": (1, f"{P0} Sec. 5.3: 1 H100"),
    },
    ("mhgpo-table1", "MHGPO-RR", "HotpotQA", "train"): {
        "train.lr": (5e-7, f"{P1} B.2"),
        "train.batch_size": (512, f"{P1} Table 5"),
        "train.steps": (176, f"{P1} B.1: one epoch of 90,447"),
        "algo.group_size": (4, f"{P1} Table 5"),
        "algo.clip": (0.2, f"{P1} Table 5"),
        "algo.top_p": (0.9, f"{P1} Table 5"),
        "algo.beta": (0.001, f"{P1} Table 5"),
        "task.data.dev_items": (500, f"{P1} Sec. 4.1"),
        "task.data.dev": ("hotpotqa/hotpot_qa:distractor:validation", "the hub's set has train and validation alone"),
        "eval.every": (5, f"{P1} Sec. 4.1"),
        "model.lora": (None, f"{P1} Sec. 4.1"),
        "hardware.processes": (8, f"{P1} App. B"),
        "task.retriever.model": ("facebook/contriever", f"{P1} Sec. 4.1"),
    },
    ("mhgpo-table1", "MAPPO", "HotpotQA", "train"): {
        "algo.critic_lr_factor": (2.0, f"{P1} B.2: 1e-6"),
        "algo.gamma": (1.0, "MMOA-RAG"),
    },
    ("mhgpo-table1", "LLM + PPO", "HotpotQA", "train"): {
        "train.weight_decay": (0.01, f"{P1} B.2: other parameters are shared"),
        "algo.minibatches": (1, f"{P1} B.2"),
        "train.lr": (5e-7, f"{P1} B.2"),
    },
    ("mhgpo-table1", "R1-Searcher(PPO), first", "HotpotQA", "train"): {
        "task.reward": ("stage1", f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "train.lr": (2e-6, f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "train.batch_size": (15, f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "algo.beta": (1e-4, f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "algo.top_p": (0.95, f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "task.retriever.top_k": (3, f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "task.max_turns": (10, f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "task.data.train_items": (350, f"{P1} App. B; RUCAIBox/R1-Searcher"),
    },
    ("mhgpo-table1", "R1-Searcher(GRPO)", "HotpotQA", "train"): {
        "task.reward": ("outcome", f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "algo.group_size": (16, f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "train.batch_size": (65, f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "task.data.train_items": (8148, f"{P1} App. B; RUCAIBox/R1-Searcher"),
    },
    ("mhgpo-table1", "R1-Searcher(GRPO)", "MuSiQue", "eval"): {
        "task.retriever.top_k": (5, f"{P1} App. B; RUCAIBox/R1-Searcher"),
        "task.max_turns": (15, f"{P1} App. B; RUCAIBox/R1-Searcher"),
    },
    ("mhgpo-table1", "Search-o1", "2Wiki", "eval"): {
        "task.max_turns": (10, f"{P1} App. B; sunnynexus/Search-o1"),
        "task.max_tokens": (8192, f"{P1} App. B; sunnynexus/Search-o1"),
        "task.retriever.top_k": (10, f"{P1} App. B; sunnynexus/Search-o1"),
        "eval.temperature": (0.7, f"{P1} App. B; sunnynexus/Search-o1"),
        "eval.top_p": (0.8, f"{P1} App. B; sunnynexus/Search-o1"),
        "eval.top_k": (20, f"{P1} App. B; sunnynexus/Search-o1"),
        "task.data.dev": ("RUC-NLPIR/FlashRAG_datasets:2wikimultihopqa:dev", f"{P1} Table 1: 12,576 items"),
        "task.data.dev_items": (None, f"{P1} Table 1: whole counts over 12,576 items"),
    },
    ("mhgpo-table1", "MAS Qwen2.5-72B", "HotpotQA", "eval"): {
        "engine.args": (("--tensor-parallel-size=8", "--data-parallel-size=1"), "145 GB of weights on GPUs of 80"),
        "model.path": ("Qwen/Qwen2.5-72B-Instruct", f"{P1} Table 1"),
    },
    ("mhgpo-table2", "*Rewriter", "HotpotQA", "train"): {"algo.train_modules": (("rewriter",), f"{P1} Table 2")},
    ("mhgpo-table3", "Rand()", "MHGPO-RR", "train"): {"algo.aggregate": ("random", f"{P1} Table 3")},
    ("mhgpo-table4", "MAPPO final only", "HotpotQA", "train"): {"algo.penalties": (False, f"{P1} Table 4")},
    ("mhgpo-table6", "6", "HotpotQA", "train"): {"algo.group_size": (6, f"{P1} Table 6")},
    ("turn-table5", "MT-GRPO", "TriviaQA", "train"): {
        "algo.group_size": (21, f"{P2} E.3"),
        "train.lr": (1e-6, f"{P2} E.3"),
        "train.warmup_steps": (20, "SiliangZeng/Multi-Turn-RL-Agent"),
        "algo.beta": (0.0, f"{P2} E.3"),
        "algo.epochs": (2, f"{P2} E.3"),
        "train.steps": (150, f"{P2} E.3: 300 optimizer steps"),
        "train.batch_size": (16, f"{P2} E.3: 12 x 4 x 7 / 21"),
        "train.adam_beta2": (0.99, "SiliangZeng/Multi-Turn-RL-Agent"),
        "train.grad_clip": (0.1, "SiliangZeng/Multi-Turn-RL-Agent"),
        "algo.temperature": (0.9, "SiliangZeng/Multi-Turn-RL-Agent"),
        "task.max_completion": (1024, f"{P2} E.3"),
        "task.retriever.top_k": (1, f"{P2} E.1"),
        "hardware.processes": (7, f"{P2} E.3"),
        "hardware.rollout_devices": (1, f"{P2} E.3"),
    },
    ("turn-table2", "MT-PPO", "NQ", "train"): {
        "train.lr": (1e-6, f"{P2} C.2"),
        "algo.critic_lr_factor": (10.0, f"{P2} C.2: 1e-5"),
        "train.steps": (500, f"{P2} C.2"),
        "train.batch_size": (512, f"{P2} C.2"),
        "algo.minibatches": (2, f"{P2} C.2: 256 of 512"),
        "train.warmup_steps": (284, f"{P2} C.2: 0.285"),
        "algo.critic_warmup_steps": (14, f"{P2} C.2: 0.015"),
        "algo.gamma": (1.0, f"{P2} C.2"),
        "algo.gae_lambda": (1.0, f"{P2} C.2"),
        "algo.beta": (0.001, f"{P2} C.2"),
        "task.max_tokens": (500, f"{P2} C.2"),
        "task.max_observation": (500, f"{P2} C.2"),
        "task.max_context": (4096, f"{P2} C.2"),
        "task.max_turns": (4, f"{P2} C.2"),
        "task.count_final_call": (True, f"{P2} Table 4: 4 generations, 3 results"),
        "task.retriever.top_k": (3, f"{P2} C.2"),
        "task.retriever.model": ("intfloat/e5-base-v2", f"{P2} C.2"),
        "task.search_penalty": (0.1, f"{P2} Sec. 6.3"),
        "hardware.cpu_offload": (True, f"{P2} C.2: FSDP with CPU offloading"),
        "eval.temperature": (0.0, "PeterGriffinJin/Search-R1: validation is greedy"),
        "train.keep": (25, f"{P2} Sec. 6.2: the last checkpoint before collapse"),
    },
    ("turn-table2", "GRPO", "NQ", "train"): {
        "algo.group_size": (5, "PeterGriffinJin/Search-R1"),
        "algo.eps": (1e-6, "PeterGriffinJin/Search-R1"),
        "algo.loss_mean": ("token", "PeterGriffinJin/Search-R1"),
    },
    ("turn-fig4", "lambda 0.0", "NQ", "train"): {"task.search_penalty": (0.0, f"{P2} Sec. 6.3")},
    ("turn-fig6", "MT-PPO", "NQ", "train"): {
        "task.reward": ("judge_turn", f"{P2} C.4"),
        "task.judge.max_tokens": (2048, f"{P2} C.4"),
        "task.judge.concurrency": (64, "quanwei0/Search-R1"),
        "task.judge.retries": (2, "quanwei0/Search-R1"),
    },
}


def config_of(table, row, column, command, scale="paper"):
    spec = read_set(table)
    words = words_of(spec, row, column, scale, command)
    if command == "eval" and not spec.rows[row].policy:
        words.append("policy=RUN")
    return set_config(command, words, None)


@pytest.mark.parametrize("place", FACTS, ids=lambda place: " ".join(map(str, place)))
def test_the_papers_facts(place):
    config = config_of(*place)
    for key, (expected, where) in FACTS[place].items():
        value = config
        for part in key.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        assert value == expected, (key, where)


def test_every_reported_value_is_there():
    specs = [read_set(name) for name in TABLES]
    assert sum(len(spec.reported(row)) for spec in specs for row in spec.rows) == 370
    assert sum(std is not None for spec in specs for row in spec.rows for _, std in spec.reported(row).values()) == 49
    first = read_set("mhgpo-table1").reported("MHGPO-FoF(os)")
    assert first[Cell("2Wiki", "EM")] == (32.801, None) and first["OOD"] == (26.109, None)
    turns = read_set("turn-table2").reported("PPO")
    assert turns[Cell("Musique", "EM")] == (0.199, None) and turns[Cell("NQ", "format")] == (0.909, None)


@pytest.mark.parametrize("name", TABLES)
def test_printed_averages_and_claims_are_what_the_numbers_say(name):
    """One that is not was copied wrong."""
    spec = read_set(name)
    reported = {row: spec.reported(row) for row in spec.rows if spec.rows[row].values}
    values = {row: {place: value for place, (value, _) in places.items()} for row, places in reported.items()}
    # A paper averages before it rounds: half a digit from the numbers, half from the average.
    room = 1.5 * 10**-spec.source.decimals
    for row, printed in values.items():
        for mean, cells in spec.means.items():
            inner = fmean(printed[cell] for cell in spec.selected(cells))
            assert printed[mean] == pytest.approx(inner, abs=room), (row, mean)
    for claim in spec.claims:
        if claim.more in values and claim.than in values:
            more, than = (fmean(values[row][c] for c in spec.selected(claim.cells)) for row in (claim.more, claim.than))
            assert more > than, claim


@pytest.mark.skipif(not PAPERS.is_dir(), reason="the papers' texts are not here (MMRL_PAPERS=FOLDER)")
def test_every_reported_value_stands_in_the_papers():
    texts = [line for path in sorted(PAPERS.glob("*.txt")) for line in path.read_text(errors="replace").splitlines()]
    number = r"(?<![\w.])\d+\.?\d*"
    lines = [[float(text) for text in re.findall(number, re.sub(r"<[^>]*>", " ", line))] for line in texts]
    counted = 0
    for name in TABLES:
        spec = read_set(name)
        for row in spec.rows:
            for numbers in printed(spec, row):
                counted += len(numbers)
                assert any(holds(line, numbers) for line in lines if len(line) >= len(numbers)), (name, row)
    assert counted == 370 + 49


def printed(spec, row):
    """A row's numbers as they stand side by side in a line; of scores printed apart, in one line each."""
    values = spec.reported(row)
    blocks = [[*spec.cells, *spec.means]]
    if spec.order == "scores":
        blocks = [
            [*(c for c in spec.cells if c.score == score), *(m for m, of in spec.means.items() if of == (score,))]
            for score in spec.scores
        ]
    for block in blocks if values else ():
        yield [number for place in block for number in values[place] if number is not None]


def holds(line, numbers):
    return any(line[start : start + len(numbers)] == numbers for start in range(len(line) - len(numbers) + 1))


@pytest.mark.parametrize("name", set_names())
def test_every_config_of_a_shipped_set_composes(name):
    spec = read_set(name)
    composed = set()
    for scale in scales_of(spec):
        for row, column in spec.pairs:
            for command in ("train", "eval") if spec.scores else ("train",):
                words = words_of(spec, row, column, scale, command)
                if (command == "train" and spec.rows[row].policy) or tuple(words) in composed:
                    continue
                composed.add(tuple(words))
                config = set_config(command, [*words, *(["policy=tiny"] if command == "eval" else [])], None)
                assert spec.scores or config.eval.items >= 200, "needed to say that it learns"
                if name in TABLES and scale == "mini":
                    assert config.task.data.dev == "mini" and config.hardware.name == "cpu"
                    assert config.model.path.startswith("tiny")
                    assert config.eval.items == (240 if command == "eval" else 24)


def test_the_words_of_published_runs_stay_as_they_are():
    """Frozen, in their order, by set, scale, row, column and command: a change of them is another experiment."""
    frozen = json.loads(gzip.decompress((Path(__file__).parent / "words.json.gz").read_bytes()))
    read = functools.cache(read_set)
    for place, words in frozen.items():
        name, scale, row, column, command = place.split("|")
        assert words_of(read(name), row, column, scale, command) == words, place


def test_the_shipped_sets_run_every_task_of_the_mini_world_and_every_algorithm():
    own = [read_set(name) for name in set_names() if name not in TABLES]
    tasks = {
        word[5:] for spec in own for column in spec.columns.values() for word in column.train if word[:5] == "task="
    }
    algos = {word[5:] for spec in own for row in spec.rows.values() for word in row.train if word.startswith("algo=")}
    assert tasks == {task for tasks in SHIPPED.values() for task in tasks}
    assert algos == {*ALGO_SCHEMAS, "miprov2", "sft"} and all(len(spec.seeds) >= 3 for spec in own)


SPEC = {
    "source": {"arxiv": "0000.00000", "at": "Table 1", "decimals": 1},
    "shows": "x",
    "seeds": [0],
    "columns": {"A": {}, "B": {}},
    "scores": {"EM": "em", "F1": "f1"},
    "means": {"AVG": ["F1"]},
    "rows": {"one": {"values": [1.0, 2.0, 3.0, 4.0, 3.0]}, "two": {"values": [1.0, 1.0, 1.0, 1.0, 1.0]}},
    "agree": 1,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": {"one": {"values": [1.0, 2.0]}}}, "rows.one.values: got 2 numbers, expected 5 or none"),
        ({"rows": {"one": {"vlaues": []}}}, "rows.one.vlaues: unknown key; did you mean 'values'?"),
        ({"claims": [{"more": "one", "than": "tow"}]}, "claims.1.than: got 'tow'"),
        ({"claims": [{"more": "one", "than": "two", "cells": ["EN"]}]}, "claims.1.cells: got 'EN'"),
        ({"means": {"AVG": ["F2"]}}, "means.AVG: got 'F2'"),
        ({"means": {"A": ["F1"]}}, "columns, scores, means: A is the name of two of them"),
        ({"set": ["task"]}, "set: got task, expected KEY=VALUE"),
        ({"sores": {}}, "sores: unknown key"),
        ({"rows": {"one": {"from": "tow"}, "two": {}}}, "rows.one.from: got 'tow'"),
        (
            {"rows": {"one": {"from": "two"}, "two": {"from": "one"}}},
            "rows.one.from: one starts from two starts from one",
        ),
        (
            {"rows": {"one": {"from": "two"}, "two": {"policy": "tiny"}}},
            "rows.one.from: only what is trained starts from a row",
        ),
        ({"columns": {"A": {"rows": ["tow"]}, "B": {}}}, "columns.A.rows: got 'tow'"),
        ({"columns": {"A": {"cells": {"tow": ["x=1"]}}, "B": {}}}, "columns.A.cells: got 'tow'"),
        ({"scores": {}, "means": {}, "rows": {"one": {"policy": "tiny"}}}, "rows.one.policy: nothing is trained"),
    ],
)
def test_a_wrong_table_is_refused_in_words(changes, said):
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as caught:
        SetSpec.model_validate(as_tuples({**SPEC, **changes}))
    problems = explain(SetSpec, caught.value)
    assert any(problem.startswith(said) for problem in problems), problems


def test_a_right_one_is_not(tmp_path):
    spec = SetSpec.model_validate(as_tuples(SPEC))
    assert spec.reported("one")["AVG"] == (3.0, None) and spec.selected(["AVG"]) == [Cell("A", "F1"), Cell("B", "F1")]
    assert spec.label(Cell("A", "F1")) == "A F1"


def test_every_table_stands_in_the_docs():
    text = (CONF.parent / "docs" / "reproducing.md").read_text(encoding="utf-8")
    families = [name.rpartition("-")[2] for name in TABLES]
    assert [name for name in families if f"-{name}`" not in text] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "rows: missing"),
        ("rows: {a: {}}", "shows: missing"),
        ("shows: x\nrows: {a: {seed: 1}}", "rows.a.seed: unknown key; did you mean 'seeds'?"),
        ("shows: x\nrows: {a: {}}\nalgos: {ppoo: [x=1]}", "mine.yaml: algos: got 'ppoo'"),
        ("shows: x\nbase: nowhere\nrows: {a: {}}", "set/base: got 'nowhere'"),
        ("rows: {", "cannot be read"),
    ],
)
def test_a_malformed_set_is_refused_with_its_name(text, says, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_set("mine", str(tmp_path))
    assert "mine" in str(caught.value) or "nowhere" in str(caught.value)
    assert says in str(caught.value), str(caught.value)


def test_an_experiment_that_is_not_there_names_its_file(capsys):
    assert main(["eval", "policy=tiny", "experiment=mine"]) == 2
    assert "experiment: got 'mine', and there is none; conf/experiment/mine.yaml" in capsys.readouterr().err


def test_an_evaluation_of_ones_own_is_not_trained(tmp_path, monkeypatch, capsys):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/look.yaml").write_text("# @package _global_\npolicy: tiny\n")
    (tmp_path / "conf/experiment/learn.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algo: grpo\ntrain: {steps: 3}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=look"]) == 2
    assert "policy: unknown key" in capsys.readouterr().err
    assert main(["eval", "policy=tiny", "experiment=learn"]) == 2
    assert "Could not override 'algo'" in capsys.readouterr().err
