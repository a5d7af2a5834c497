"""Runs with `algo.distill` and `task.reward=privileged`: what teachers score and read, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import LlamaConfig, PreTrainedTokenizerFast

from mmrl.cli import main
from mmrl.cli.configs import train_configs
from mmrl.cli.overrides import read_line
from mmrl.commands.plan import problems_elsewhere
from mmrl.config import AlgoConfig, ModelConfig
from mmrl.credit.distillation import distillation_metrics
from mmrl.errors import ConfigError
from mmrl.models.chat import encode_text, end_of_prompt, render_observation, render_prompt
from mmrl.models.load import load_model, load_tokenizer
from mmrl.records import Call, Example, Forest, Rollout
from mmrl.run.build import build_task, model_of_teacher
from mmrl.run.distill import PROBE, ScoringServer, load_scorers
from mmrl.stages.distillation import Teachers, privileged_problems
from mmrl.store.journal import read_step
from mmrl.store.policy import Policy
from mmrl.store.rundir import RunDir
from mmrl.trainer import teaching
from tests.helpers.lines import refused
from tests.helpers.runs import command, contents
from tests.helpers.servers import Scripted, Seen, serving

GOLD = "algo.privileged={answerer: 'The right answer: {answers}', reranker: titles}"


def line_of(random_model: str, folder: Path, *words: str) -> list[str]:
    """A command of a small run, without keys of groups where nothing is compared."""
    line = command(random_model, folder, "train.steps=1", "eval.every=0", *words)
    grouped = "algo=distill" not in words
    return [word for word in line if grouped or not word.startswith(("algo.group_size", "algo.beta"))]


def run_of(random_model: str, folder: Path, *words: str) -> RunDir:
    assert main(line_of(random_model, folder, *words)) == 0
    return RunDir.read(folder)


def distributions(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of every token at each place of the completion, (T, V), by one plain forward of the row."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def logprobs(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> list[float]:
    rows = distributions(model, prompt, completion)
    return [float(row[token]) for row, token in zip(rows, completion, strict=True)]


def test_a_teacher_forwards_a_step_once(random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update's divergence takes what its head saw when it scored."""
    other = tmp_path / "other"
    shutil.copytree(random_model, other)
    words = [f"algo.distill={{rewriter: '{other}', answerer: policy, reranker: initial}}", GOLD]

    def again(*_: object) -> None:
        raise AssertionError("forwarded again")

    monkeypatch.setattr(teaching, "hidden_states", again)
    run = run_of(random_model, tmp_path / "run", "algo=mhgpo_rr", *words, "algo.distill_kl=exact")
    assert run.history()[1]["module/answerer/teacher_kl"] > 0


@pytest.mark.parametrize("kl", ["sampled", "exact"])
def test_a_teacher_scores_what_was_sampled_and_reads_what_was_not(kl: str, random_model: str, tmp_path: Path) -> None:
    """Three teachers in one run, beside rewards: another model, the policy with the answer at hand, the start."""
    other = tmp_path / "other"
    shutil.copytree(random_model, other)
    torch.manual_seed(5)
    model = load_model(ModelConfig(name="x", path=random_model), "cpu")
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(other)
    teachers = f"algo.distill={{rewriter: '{other}', answerer: policy, reranker: initial}}"
    run = run_of(random_model, tmp_path / "run", "algo=mhgpo_rr", teachers, GOLD, f"algo.distill_kl={kl}")
    forest, entries = read_step(run, 1)
    whole: dict[str, list[float]] = {module: [] for module in forest.modules}
    tokenizer = load_tokenizer(ModelConfig(name="x", path=random_model))
    start = load_model(ModelConfig(name="x", path=random_model), "cpu").eval()
    by = {"rewriter": model.eval(), "answerer": start, "reranker": start}
    (config,) = train_configs(read_line(["task=hotpotqa", "algo=grpo"]))
    task = build_task(config.task, 0)
    gold = {e.id: ("; ".join(e.metadata["answers"]), "; ".join(e.metadata["titles"])) for e in task.examples("train")}
    frame = end_of_prompt(tokenizer)
    for call in forest.calls.values():
        assert "right answer" not in call.prompt_text and "titles:" not in call.prompt_text
        assert not any("right answer" in tokenizer.decode(list(ids)) for ids in (call.prompt_ids, call.completion_ids))
        prompt = call.prompt_ids
        assert prompt[-len(frame) :] == frame
        if call.module != "rewriter":
            answers, titles = gold[call.example]
            text = f"The right answer: {answers}" if call.module == "answerer" else f"titles: {titles}"
            prompt = prompt[: -len(frame)] + tuple(encode_text(tokenizer, f"\n\n{text}")) + frame
        theirs = logprobs(by[call.module], prompt, call.completion_ids)
        ours = logprobs(start, call.prompt_ids, call.completion_ids)
        assert call.distillation == pytest.approx([t - s for t, s in zip(theirs, ours, strict=True)], abs=2e-4)
        p = distributions(start, call.prompt_ids, call.completion_ids)
        q = distributions(by[call.module], prompt, call.completion_ids)
        whole[call.module] += (p.exp() * (p - q)).sum(-1).tolist()
    distilled = [entry for entry in entries if entry.get("distilled")]
    assert {entry["call"] for entry in distilled} == set(forest.calls)
    assert all(entry["advantages"] == forest.calls[entry["call"]].distillation for entry in distilled)
    assert main(["credit", f"run={tmp_path / 'run'}", "step=1"]) == 0, "computed again from the journal, to the bit"
    said = str(run.summary["facts"]["teachers"])
    assert said.startswith(f"rewriter by {other}; answerer by policy, which reads: ") and "reranker by initial" in said
    record = run.history()[1]
    assert record["module/rewriter/teacher_gap"] < -0.01 and record["train/grad_norm"] > 0
    for module, numbers in whole.items():
        expected = pytest.approx(fmean(numbers), rel=1e-3, abs=1e-6) if kl == "exact" else None
        assert record.get(f"module/{module}/teacher_kl") == expected


def test_the_policy_as_its_own_teacher_learns_exactly_nothing(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(random_model, tmp_path / "run", "algo=distill", "algo.distill={answerer: policy, reranker: initial}")
    said = capsys.readouterr().err
    for module in (
        "answerer: the policy is its own teacher (policy)",
        "reranker: the policy is its own teacher (initial)",
    ):
        assert said.count(f"algo.distill.{module}") == 1
    forest, entries = read_step(run, 1)
    gaps = [value for call in forest.calls.values() for value in call.distillation or ()]
    assert gaps and all(gap == 0.0 for gap in gaps), "and so are the weights that the run began with, in its first step"
    assert {forest.calls[entry["call"]].module for entry in entries} == {"answerer", "reranker"}
    record = run.history()[1]
    assert record["train/tokens"] == 0 and record["train/loss"] == 0


@pytest.mark.parametrize("kl", ["sampled", "exact"])
def test_a_run_that_was_stopped_goes_on_as_it_would_have(kl: str, random_model: str, tmp_path: Path) -> None:
    words = ["algo=distill", "algo.distill={answerer: initial}", GOLD.replace(", reranker: titles", "")]
    words.append(f"algo.distill_kl={kl}")
    words += ["train.steps=3", "train.save_every=1", "eval.every=2"]
    run_of(random_model, tmp_path / "whole", *words)
    run = run_of(random_model, tmp_path / "run", *words)
    shutil.rmtree(run.path / "checkpoints" / "checkpoint-3")
    (run.path / "summary.json").unlink()
    assert main(["train", f"resume={run.path}"]) == 0
    whole, resumed = contents(tmp_path / "whole"), contents(run.path)
    assert whole[0] == resumed[0] and {k: v for k, v in whole[2].items() if "checkpoint-3" in k} == {
        k: v for k, v in resumed[2].items() if "checkpoint-3" in k
    }


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_tokenizer(ModelConfig(name="tiny", path="tiny"))


class Scores:
    """A stand-in for the trainer's forwards: log-probability -0.1 · (place in the row) of every token."""

    def policy_logprobs(self, calls: Any, *, reference: bool = False) -> list[tuple[float, ...]]:
        self.seen = [*getattr(self, "seen", []), *calls]
        return [tuple(-0.1 * (len(c.prompt_ids) + t) for t in range(len(c.completion_ids))) for c in calls]


def two_turns(tokenizer: Any) -> Forest:
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "Who made it?"}])
    said = (7, 8, 9)
    later = render_observation(tokenizer, prompt + said, "Found: a film.")
    first = Call(id="q/0#0", example="q", parent=None, module="agent", prompt_ids=prompt, completion_ids=said,
                 completion_tokens=3)  # fmt: skip
    second = Call(id="q/0#1", example="q", parent=first.id, module="agent", turn=1, invocation=1, prompt_ids=later,
                  completion_ids=(5, 6), completion_tokens=2)  # fmt: skip
    rollout = Rollout(id="q/0", example="q", leaf=second.id, reward=1.0, feedback={"agent": "no source named"})
    return Forest(calls={c.id: c for c in (first, second)}, rollouts=(rollout,), modules=("agent",))


@pytest.mark.parametrize(("evidence", "first"), [("sum", -0.1 * 3), ("mean", -0.1)])
def test_evidence_is_a_turns_reward_and_its_text_stands_in_the_first_prompt(
    evidence: str, first: float, tiny: Any
) -> None:
    forest, scores = two_turns(tiny), Scores()
    algo = AlgoConfig(name="x", privileged={"agent": "Answer {answers}, but {feedback}."})
    teachers = Teachers(algo=algo, forwards=scores, tokenizer=tiny)  # type: ignore[arg-type]
    example = Example(id="q", inputs={"question": "Who made it?"}, metadata={"answers": ["Ann", "A. Lee"]})
    found = teachers.complete(forest, {"q": example}, evidence)
    text = encode_text(tiny, "\n\nAnswer Ann; A. Lee, but no source named.")
    shift = len(text)
    one, two = found.calls.values()
    assert one.turn_reward == pytest.approx(first * shift) and two.turn_reward is None, "the last call has the outcome"
    total = -0.1 * shift * (2 if evidence == "sum" else 1)
    assert two.facts["privileged_gain"] == pytest.approx(total)
    assert one.distillation is None and two.distillation is None, "nothing is distilled"
    frame, prompt = end_of_prompt(tiny), forest.calls["q/0#0"].prompt_ids
    views = [call for call in scores.seen if call.prompt_ids not in {c.prompt_ids for c in forest.calls.values()}]
    at = len(prompt) - len(frame)
    for view, call in zip(views, forest.calls.values(), strict=True):
        assert view.prompt_ids == call.prompt_ids[:at] + tuple(text) + call.prompt_ids[at:]
        assert view.completion_ids == call.completion_ids


def test_what_no_longer_fits_the_context_has_no_teacher(tiny: Any) -> None:
    forest = two_turns(tiny)
    algo = AlgoConfig(name="x", distill={"agent": "initial"}, privileged={"agent": "{note}"})
    example = Example(id="q", inputs={}, metadata={"note": "word " * 9})
    longest = max(len(c.prompt_ids) + c.completion_tokens for c in forest.calls.values())
    added = len(encode_text(tiny, "\n\n" + "word " * 9))
    for limit, lengths in ((longest + added, [3, 2]), (longest + added - 1, [3, None]), (3, [None, None])):
        limits = {"initial": limit, "another": 1}
        teachers = Teachers(algo=algo, forwards=Scores(), tokenizer=tiny, limits=limits)  # type: ignore[arg-type]
        found = teachers.complete(forest, {"q": example}, None)
        assert [c.distillation and len(c.distillation) for c in found.calls.values()] == lengths


def test_the_start_forwards_also_what_a_critics_run_knows_of_it(tiny: Any) -> None:
    """Of sharded weights all processes forward or none does, and those with fewer calls have fillers."""
    forest, scores = two_turns(tiny), Scores()
    known = {name: replace(call, ref_logprobs=(-1.0,) * call.completion_tokens) for name, call in forest.calls.items()}
    algo = AlgoConfig(name="x", distill={"agent": "initial"})
    teachers = Teachers(algo=algo, forwards=scores, tokenizer=tiny)  # type: ignore[arg-type]
    teachers.complete(replace(forest, calls=known), {"q": Example(id="q", inputs={})}, None)
    assert [call.ref_logprobs is None for call in scores.seen] == [False, False, True, True]


def test_without_feedback_a_teacher_that_reads_it_says_nothing(tiny: Any) -> None:
    forest = two_turns(tiny)
    silent = replace(forest, rollouts=tuple(replace(rollout, feedback={}) for rollout in forest.rollouts))
    algo = AlgoConfig(name="x", distill={"agent": "policy"}, privileged={"agent": "{feedback}"})
    teachers = Teachers(algo=algo, forwards=Scores(), tokenizer=tiny)  # type: ignore[arg-type]
    example = Example(id="q", inputs={})
    for given, taught in ((forest, True), (silent, False)):
        found = teachers.complete(given, {"q": example}, None)
        assert [call.distillation is not None for call in found.calls.values()] == [taught, taught]


def test_a_shared_call_reads_the_feedback_of_a_rollout_that_has_some(tiny: Any) -> None:
    """As where the first rollout through a fork failed, and so has no score."""
    forest, scores = two_turns(tiny), Scores()
    failed = Rollout(id="q/9", example="q", leaf="q/0#0", reward=0.0, error="parse")
    algo = AlgoConfig(name="x", distill={"agent": "policy"}, privileged={"agent": "{feedback}"})
    teachers = Teachers(algo=algo, forwards=scores, tokenizer=tiny)  # type: ignore[arg-type]
    found = teachers.complete(
        replace(forest, rollouts=(failed, *forest.rollouts)), {"q": Example(id="q", inputs={})}, None
    )
    assert all(call.distillation for call in found.calls.values())


def test_fields_that_records_lack_are_named() -> None:
    records = [
        Example(id=f"q{n}", inputs={"question": "?"}, metadata={"answers": ["a"]} if n else {}) for n in range(3)
    ]
    algo = AlgoConfig(name="x", distill={"a": "policy"}, privileged={"a": "{answers} {feedback}", "b": "hint"})
    assert privileged_problems(algo, records) == [
        "algo.privileged.a: 1 of 3 training records have no field 'answers' (the first: 'q0'); they have question",
        "algo.privileged.b: 3 of 3 training records have no field 'hint' (the first: 'q0'); they have question",
    ]


def test_a_field_that_is_always_empty_or_has_the_name_of_feedback_is_named() -> None:
    records = [Example(id=f"q{n}", inputs={"note": None, "hint": n or ""}, metadata={"feedback": "x"}) for n in (0, 1)]
    algo = AlgoConfig(name="x", distill={"a": "policy"}, privileged={"a": "note", "b": "{hint} {feedback}"})
    assert privileged_problems(algo, records) == [
        "algo.privileged.a: the field 'note' is empty in all training records",
        "algo.privileged.b: {feedback} is what the task's score says in words, and records have a field of that name; "
        "rename it in the data",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((empty, None) for empty in (None, "", [], {}, ())),
        (0, "0"),
        (False, "false"),
        (["a", ["b", {"c": None}]], '["a", ["b", {"c": null}]]'),
        ("a {note} }{ {feedback} \u65e5\u672c <|im_end|>", "a {note} }{ {feedback} \u65e5\u672c <|im_end|>"),
        ("word " * 2000, "word " * 2000),
    ],
)
def test_a_field_is_read_as_it_is_and_an_empty_one_is_no_teacher(value: object, text: str | None, tiny: Any) -> None:
    forest, scores = two_turns(tiny), Scores()
    algo = AlgoConfig(name="x", distill={"agent": "policy"}, privileged={"agent": "note"})
    teachers = Teachers(algo=algo, forwards=scores, tokenizer=tiny)  # type: ignore[arg-type]
    found = teachers.complete(forest, {"q": Example(id="q", inputs={}, metadata={"note": value})}, None)
    assert [call.distillation is not None for call in found.calls.values()] == [text is not None] * 2
    read = [call.prompt_ids for call in scores.seen if call not in forest.calls.values()]
    # No text of the data becomes a special token, so the plain text comes back.
    added = [tiny.decode(list(ids)[-len(end_of_prompt(tiny)) - len(encode_text(tiny, f"\n\nnote: {text}")) :])
             for ids in read[:1]]  # fmt: skip
    assert text is None or added[0].startswith(f"\n\nnote: {text}")


MISTAKES = {
    "algo=distill": "algo.distill: missing, a value is required",
    "algo=distill algo.distill={writer:policy}": "algo.distill: got 'writer', expected one of answerer, rer",
    "algo=grpo algo.privileged={answerer:answers}": "algo.privileged.answerer: has no effect: the module has no",
    "algo=distill algo.distill={answerer:policy} algo.privileged={answerer:hint}": "have no field 'hint'",
    "algo=distill algo.distill={answerer:''}": "algo.distill.answerer: got '', expected policy, initial, ",
    "algo=distill algo.distill={}": "algo.distill: got {}, expected at least one module",
    "algo=grpo algo.distill={answerer:policy} algo.privileged={}": "algo.privileged: got {}, expected at least one",
    "algo=distill algo.distill={answerer:policy} algo.privileged={answerer:''}": "algo.privileged.answerer: got ''",
    "algo=distill algo.distill={answerer:policy} algo.privileged={answerer:Think-twice.}": "no field 'Think-twice.'",
    "algo=distill algo.distill={answerer:policy} algo.privileged={answerer:'{answers}{a-b}'}": "have no field 'a-b'",
    "algo=grpo algo.zero_variance=refill algo.distill={answerer:policy}": "algo.zero_variance: got refill, which",
    "algo=distill algo.distill={answerer:./nowhere}": "algo.distill.answerer: got './nowhere'",
    "algo=distill algo.distill={answerer:polcy}": "server; did you mean 'policy'?",
    "algo=distill algo.distill={answerer:policy} algo.distill_coef=0": "algo.distill_coef: got 0, expected greater",
    "algo=distill algo.distill={answerer:policy} algo.privileged={answerer:'is-{answers'}": "a brace has no partner",
    "algo=distill algo.distill={answerer:policy} algo.privileged={answerer:'{{answers}}'}": "a brace has no partner",
    "algo=distill algo.distill={answerer:policy} algo.beta=0.1": "algo.beta: got 0.1, expected less than or equal to 0",
    "algo=distill algo.distill={answerer:policy} algo.advantage_scale={answerer:2.0}": "algo.advantage_scale: ",
    "algo=grpo algo.distill_coef=0.5": "algo.distill_coef: got 0.5, which has no effect without a teacher",
    "algo=grpo algo.distill={answerer:'http://127.0.0.1:9'}": "algo.temperature: got 0.9, and a server",
    "algo=distill algo.distill={answerer:'http://127.0.0.1:9'}": "algo.distill.answerer: got http://127.0.0.1:9: ",
    "algo=grpo algo.distill_kl=exact": "algo.distill_kl: got exact, which has no effect without a teacher",
    "algo=distill algo.distill_kl=exact algo.distill={answerer:'http://127.0.0.1:9'}": "algo.distill_kl: got exact, ",
    "algo=distill algo.distill_kl=exact algo.distill={answerer:policy} algo.clip=0.1": "algo.clip: got 0.1, which has",
    "algo=mmgrpo algo.reserialise=true algo.distill={answerer:policy}": "algo.distill: teachers score sampled tokens",
    "algo=mhgpo_rr algo.freeze_modules=[reranker] algo.distill={reranker:policy}": "the module is not trained",
    "algo=mt_ppo task=search_agent task.reward=privileged": "task.reward: got privileged, and nothing is; set",
    "algo=grpo task=search_agent task.reward=privileged algo.privileged={agent:answers}": "algo=grpo reads none",
    "algo=mt_ppo task=search_agent task.reward=privileged algo.privileged={agent:'{feedback}'}": "has no feedback: its",
    "algo=gigpo task=search_agent task.reward=turn task.privileged=mean": "task.privileged: got mean, which has no",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_named_before_anything_loads(words: str) -> None:
    task = [] if "task=" in words else ["task=hotpotqa"]
    problems = refused(*words.split(), *task, "model=tiny")
    assert any(MISTAKES[words] in problem for problem in problems), problems
    assert len(problems) == 1, problems


def test_exact_divergences_of_sharded_weights_are_refused() -> None:
    words = ["algo=distill", "task=hotpotqa", "algo.distill={answerer: initial}", "algo.distill_kl=exact"]
    for hardware, said in (
        ("h100x2", []),
        ("h100x8", ["algo.distill_kl: got exact, and with hardware.sharding=fsdp2"]),
    ):
        (config,) = train_configs(read_line([*words, f"hardware={hardware}"]))
        found = problems_elsewhere(config)
        assert len(found) == len(said) and all(a.startswith(b) for a, b in zip(found, said, strict=True)), found


@pytest.mark.parametrize(
    "weights",
    [
        ["algo.freeze_modules=[reranker]", "algo.frozen_serving=true"],
        ["model.lora={r: 2}", "model.modules={reranker: {frozen: true}}"],
    ],
)
def test_a_teacher_with_weights_per_module_scores_each_by_its_own(
    weights: list[str], random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The teacher's reranker is still the start, of which the student is, too; its answerer has learnt."""
    taught = ["algo.distill={answerer: policy}", "algo.privileged={answerer: answers}", "train.lr=0.01"]
    run_of(random_model, tmp_path / "teacher", "algo=mhgpo_rr", *taught, *weights)
    teachers = f"algo.distill={{answerer: '{tmp_path / 'teacher'}', reranker: '{tmp_path / 'teacher'}'}}"
    run = run_of(random_model, tmp_path / "run", "algo=distill", teachers, "algo.distill_kl=exact")
    forest, _ = read_step(run, 1)
    gaps = {module: [g for c in forest.calls.values() if c.module == module for g in c.distillation or ()]
            for module in ("answerer", "reranker")}  # fmt: skip
    assert gaps["reranker"] == pytest.approx([0.0] * len(gaps["reranker"]), abs=1e-5)
    assert max(map(abs, gaps["answerer"])) > 1e-3
    record = run.history()[1]
    assert abs(record["module/reranker/teacher_kl"]) < 1e-6 < record["module/answerer/teacher_kl"]
    agent = f"algo.distill={{agent: '{tmp_path / 'teacher'}'}}"
    assert main(line_of(random_model, tmp_path / "no", "algo=distill", "task=search_agent", agent)) == 2
    assert "expected a policy with weights for agent" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_teacher_of_other_tokens_is_refused(random_model: str, tmp_path: Path, capsys: Any) -> None:
    assert main(line_of(random_model, tmp_path / "run", "algo=distill", "algo.distill={answerer: tiny}")) == 2
    assert "algo.distill.answerer: got 'tiny', whose tokenizer has other tokens than that of" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def vllm_like(tokenizer: Any, other: bool = False) -> Any:
    """A server's replies: token number n of a row has log-probability -n / 100."""

    def reply(seen: Seen) -> Scripted:
        if seen.path == "/v1/models":
            return Scripted({"data": [{"id": "big", "max_model_len": 4096}]})
        if seen.path == "/tokenize":
            ids = encode_text(tokenizer, seen.body["prompt"])
            return Scripted({"tokens": [i + other for i in ids]})
        assert seen.path == "/v1/completions" and seen.body["model"] == "big" and seen.body["prompt_logprobs"] == 0
        rows = [{str(token): {"logprob": -n / 100}} for n, token in enumerate(seen.body["prompt"])]
        return Scripted({"choices": [{"prompt_logprobs": [None, *rows[1:]]}]})

    return reply


def test_a_server_scores_token_ids(random_model: str, tmp_path: Path, capsys: Any) -> None:
    tokenizer = load_tokenizer(ModelConfig(name="x", path=random_model))
    start = load_model(ModelConfig(name="x", path=random_model), "cpu").eval()
    with serving(vllm_like(tokenizer)) as (url, server):
        run = run_of(random_model, tmp_path / "run", "algo=distill", f"algo.distill={{answerer: '{url}'}}")
        asked = [seen.body for seen in server.seen if seen.path == "/v1/completions"]
    forest, _ = read_step(run, 1)
    taught = [call for call in forest.calls.values() if call.module == "answerer"]
    assert taught and len(asked) >= len(taught)
    for call in taught:
        ours = logprobs(start, call.prompt_ids, call.completion_ids)
        theirs = [-(len(call.prompt_ids) + t) / 100 for t in range(call.completion_tokens)]
        assert call.distillation == pytest.approx([t - s for t, s in zip(theirs, ours, strict=True)], abs=2e-4)
    with serving(vllm_like(tokenizer, other=True)) as (url, _):
        line = line_of(random_model, tmp_path / "no", "algo=distill", f"algo.distill={{answerer: '{url}'}}")
        assert main(line) == 2
    assert "whose model 'big' has other tokens than the policy" in capsys.readouterr().err


def test_a_server_is_asked_again_and_what_is_no_number_ends_the_run_saved(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that starts anew, then one whose replies are of another kind: the step before is kept."""
    monkeypatch.setattr("mmrl.run.distill.RETRIES", 1)
    tokenizer = load_tokenizer(ModelConfig(name="x", path=random_model))
    right, probe, failing = vllm_like(tokenizer), encode_text(tokenizer, PROBE), dict[bytes, int]()
    wrong: list[Any] = []

    def reply(seen: Seen) -> Scripted:
        if seen.path != "/v1/completions" or seen.body["prompt"] == probe:
            return right(seen)
        failing[seen.raw] = failing.get(seen.raw, 0) + 1
        if failing[seen.raw] == 1:
            return Scripted("restarting", status=503)
        return Scripted(wrong[0]) if wrong else right(seen)

    words = ["algo=distill"]
    with serving(reply) as (url, _):
        run = run_of(random_model, tmp_path / "run", *words, f"algo.distill={{answerer: '{url}'}}")
        assert "module/answerer/teacher_gap" in run.history()[1] and min(failing.values()) >= 2
        rows = [None, {"1": {"logprob": -9999.0}}]
        for number, content in enumerate(
            ({"choices": [{"prompt_logprobs": None}]}, {"choices": [{"prompt_logprobs": rows}]}, {})
        ):
            failing.clear()
            wrong[:] = []
            folder = tmp_path / str(number)
            line = line_of(random_model, folder, *words, f"algo.distill={{answerer: '{url}'}}")
            line = ["train.steps=2" if word == "train.steps=1" else word for word in line]
            written = RunDir.append_metrics

            def after_one(self: RunDir, step: int, *args: Any, _given: Any = content, _write: Any = written) -> None:
                wrong[:] = [_given] if step else []
                _write(self, step, *args)

            with monkeypatch.context() as patch:
                patch.setattr(RunDir, "append_metrics", after_one)
                assert main(line) == 1
            said = capsys.readouterr().err
            assert f"algo.distill: {url.removesuffix('/v1')}: " in said and "Traceback" not in said
            assert [path.name for path in (folder / "checkpoints").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_servers_context_has_room_for_the_token_that_it_must_write(random_model: str, tmp_path: Path) -> None:
    """vLLM refuses a prompt of its whole context."""
    with serving(vllm_like(load_tokenizer(ModelConfig(name="x", path=random_model)))) as (url, _):
        config: Any
        line = line_of(random_model, tmp_path, "algo=distill", f"algo.distill={{answerer: '{url}'}}")
        (config,) = train_configs(read_line(line[1:]))
        forwards: Any = SimpleNamespace(policy=SimpleNamespace(config=LlamaConfig(max_position_embeddings=77)))
        assert load_scorers(config, forwards)[1] == {"policy": 77, "initial": 77, url: 4095}


def test_a_tokenizer_that_begins_a_text_with_a_blank_is_the_same_at_a_server(tmp_path: Path) -> None:
    """As Llama 2's and Mistral's do, whose merges join that blank with the first letters."""
    model = Tokenizer(BPE(vocab={"\u2581": 0, **{c: n + 1 for n, c in enumerate(sorted(set(PROBE) - {" "}))},
                                 "\u2581T": 90}, merges=[("\u2581", "T")], unk_token=None))  # fmt: skip
    model.pre_tokenizer = Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)

    def reply(seen: Seen) -> Scripted:
        if seen.path == "/tokenize":
            return Scripted({"tokens": tokenizer(seen.body["prompt"])["input_ids"]})
        return vllm_like(tokenizer)(seen)

    with serving(reply) as (url, _):
        assert ScoringServer(url).check(tokenizer) == 4096


def test_a_resume_has_the_teacher_of_the_start(random_model: str, tmp_path: Path) -> None:
    """Also where the run that made it has gone on since; that run keeps the checkpoint."""
    taught = ["algo=distill", "algo.distill={answerer: policy}", "algo.privileged={answerer: answers}"]
    teacher = run_of(random_model, tmp_path / "teacher", *taught)
    run = run_of(random_model, tmp_path / "run", "algo=distill", f"algo.distill={{answerer: '{teacher.path}'}}")
    checkpoint = teacher.path / "checkpoints" / "checkpoint-1"
    assert run.config["algo"]["distill"] == {"answerer": str(checkpoint)}
    assert (checkpoint.parent / ".kept-checkpoint-1").exists()


def test_a_teachers_server_may_move(random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(ModelConfig(name="x", path=random_model))
    with serving(vllm_like(tokenizer)) as (url, _):
        run = run_of(random_model, tmp_path / "run", "algo=distill", f"algo.distill={{answerer: '{url}'}}")
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "summary.json").unlink()
    config = run.path / "config.yaml"
    with serving(vllm_like(tokenizer)) as (other, server):
        config.write_text(config.read_text().replace(url, other))
        assert main(["train", f"resume={run.path}"]) == 0 and server.seen
        assert f"algo.distill.answerer={other} (was {url})" in capsys.readouterr().err
        config.write_text(config.read_text().replace(other, "policy"))
        assert main(["train", f"resume={run.path}"]) == 2


def test_a_teacher_needs_no_chat_template_and_has_its_own_revision(random_model: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(random_model, base)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        file = base / name
        if name.endswith(".json"):
            file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
        else:
            file.unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="has no chat template"):
        load_tokenizer(ModelConfig(name="x", path=str(base)))
    run_of(random_model, tmp_path / "run", "algo=distill", f"algo.distill={{answerer: '{base}'}}")
    student = ModelConfig(name="hf", path="org/student", revision="abc")
    found = [model_of_teacher(student, name, Policy(base=name)) for name in ("org/teacher", "org/student")]
    assert [(section.path, section.revision) for section in found] == [("org/teacher", None), ("org/student", "abc")]


def test_tiny_is_the_shipped_model_of_the_task() -> None:
    config: Any
    (config,) = train_configs(read_line(["task=search_agent", "algo=distill", "algo.distill={agent: tiny}"]))
    assert config.algo.distill == {"agent": config.model.path} == {"agent": "tiny_qa"}


def test_turns_without_a_reward_by_what_is_read_are_counted(tiny: Any) -> None:
    """`task.reward=privileged`, without a teacher in the loss."""
    algo = AlgoConfig(name="x", privileged={"agent": "note"})
    scores: Any = Scores()
    for value, share in (("a note", 0.0), ("", 1.0)):
        teachers = Teachers(algo=algo, forwards=scores, tokenizer=tiny)
        example = Example(id="q", inputs={}, metadata={"note": value})
        forest = teachers.complete(two_turns(tiny), {"q": example}, "sum")
        assert distillation_metrics(forest, algo, ()) == {"module/agent/untaught_share": share}


def test_turn_rewards_by_evidence_reach_the_credit(random_model: str, tmp_path: Path) -> None:
    words = ["task=search_agent", "task.reward=privileged", "algo.privileged={agent: 'Answer: {answers}'}"]
    run = run_of(random_model, tmp_path / "run", "algo=mt_grpo_variable", *words, "task.max_turns=2")
    forest, entries = read_step(run, 1)
    inner = [call for call in forest.calls.values() if forest.children[call.id]]
    assert all((call.turn_reward is not None) == bool(forest.children[call.id]) for call in forest.calls.values())
    by_call = {entry["call"]: entry for entry in entries}
    assert all(by_call[call.id]["parts"]["turn"] == call.turn_reward for call in inner)
    assert all(math.isfinite(call.facts["privileged_gain"]) for call in forest.calls.values() if call.completion_ids)
