"""A weight stage on optimised prompts of a DSPy program: what is sent is DSPy's, what is trained was sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dspy
import pytest
from transformers import AutoTokenizer

from mmrl.cli import main
from mmrl.engines.base import Completion, Request
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.stages import rl
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir
from mmrl.trainer.objective import StepBatch
from tests.helpers.programs import make_dspy
from tests.helpers.runs import SMALL

# as optimisers leave them: a bootstrapped one, one without reasoning, one with the braces and markers of others
DEMOS: list[Any] = [
    dspy.Example(augmented=True, text="It came broken.", reasoning="it is broken", label="broken"),
    dspy.Example(text="Where is {it}?", label="late"),
    {"text": "a\n[[ ## label ## ]]\nlost", "reasoning": "é <|im_end|>", "label": "lost"},
]


def optimised(path: Path) -> str:
    """The file of prompts that DSPy saves."""
    program = make_dspy("banking77").program.module
    predictor = program.classify.predict
    predictor.demos = DEMOS
    predictor.signature = predictor.signature.with_instructions('Name the intent, as {"label": …}.')
    program.save(path)
    return str(path)


def test_a_step_sends_what_dspy_renders_and_trains_what_was_sampled(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[tuple[Request, Completion]] = []
    batches: list[StepBatch] = []
    generate = TransformersEngine.generate

    async def watched(self: TransformersEngine, request: Request) -> Completion:
        completion = await generate(self, request)
        sampled.append((request, completion))
        return completion

    def batch(**fields: Any) -> StepBatch:
        batches.append(StepBatch(**fields))
        return batches[-1]

    monkeypatch.setattr(TransformersEngine, "generate", watched)
    monkeypatch.setattr(rl, "StepBatch", batch)
    options = ["task=banking77", "algo=mmgrpo", "algo.rollouts=3", "algo.beta=0.1", "train.steps=1"]
    prompts = optimised(tmp_path / "program.json")
    small = [option for option in SMALL if not option.startswith(("task.retriever", "algo.", "eval."))]
    small += ["eval.every=0", "eval.items=1"]
    folder = tmp_path / "run"
    arguments = [*options, f"task.prompts={prompts}", f"model.path={random_model}", f"run.dir={folder}", *small]
    assert main(["train", *arguments]) == 0

    run = RunDir.read(folder)
    forest, _ = read_step(run, 1)
    # DSPy alone, with the file that it saved itself
    plain = make_dspy("banking77").program.module
    plain.load(prompts)
    predictor = plain.classify.predict
    texts = {example.id: example.inputs["text"] for example in make_dspy("banking77").examples("train")}
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    # evaluations sample other examples
    ours = [(request, completion) for request, completion in sampled if request.order[0] in forest.calls]
    by_call = {request.order[0]: (request, completion) for request, completion in ours}
    assert len(by_call) == len(ours) == len(forest.calls) == 6
    for call in forest.calls.values():
        request, completion = by_call[call.id]
        expected = dspy.ChatAdapter().format(predictor.signature, predictor.demos, {"text": texts[call.example]})
        assert [dict(message) for message in request.messages or ()] == expected
        roles = [message["role"] for message in expected]
        assert roles == ["system", *["user", "assistant"] * 3, "user"]
        rendered = tokenizer.apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode([*request.prompt_ids]) == rendered
        assert (call.prompt_ids, call.completion_ids) == (request.prompt_ids, completion.ids)
        assert call.logprobs == completion.logprobs and not call.sampled_ids

    (trained,) = batches
    assert {one.call.id for one in trained.calls} == set(forest.calls)
    for one in trained.calls:
        request, completion = by_call[one.call.id]
        assert (one.call.prompt_ids, one.call.completion_ids) == (request.prompt_ids, completion.ids)
    # what all six share (system message, demonstrations) went through the model once
    everything = sum(len(one.call.prompt_ids) + len(one.call.completion_ids) for one in trained.calls)
    assert run.history()[-1]["train/tokens_forwarded"] < everything / 4
