"""`algo.reserialise`: what is trained is the canonical text, what could not be parsed stays as sampled."""

from dataclasses import replace

import dspy

from mmrl.cli import main
from mmrl.rollout.dspy.dspy_program import DspyProgram
from mmrl.rollout.sample import reserialised
from mmrl.tasks.base import Canonical
from mmrl.tasks.prompts import load_prompts
from mmrl.tasks.search_program import TEMPLATES, SearchProgram, parse_answer, parse_queries, parse_selection
from tests.helpers.forests import Grow
from tests.helpers.programs import Chain, letters

PROGRAM = SearchProgram(load_prompts(TEMPLATES, None), 10)
END = 0


def forest_of(*texts, **fields):
    grow = Grow(("rewriter", "reranker", "answerer"))
    parent = None
    for number, (module, text) in enumerate(texts):
        parent = grow.call(
            f"q/{number}",
            parent,
            module,
            len(text) + 1,
            completion_ids=(*letters(text), END),
            text=text,
            logprobs=(-0.5,) * (len(text) + 1),
            facts={"candidates": 4},
            **fields,
        )
    grow.end(parent, 1.0)
    return grow.forest


def trained(forest):
    return {call.id: "".join(map(chr, call.completion_ids[:-1])) for call in forest.calls.values()}


def test_the_search_programs_outputs_are_written_as_they_were_read():
    forest = forest_of(
        ("rewriter", "Sure! ### who made it ;< when> ### bye"),
        ("reranker", "I take 3, 3 and 1 (and 9)"),
        ("answerer", "Hm.\n\nThe answer is: *Rome*"),
    )
    found = reserialised(forest, PROGRAM, letters, END)
    assert trained(found) == {"q/0": "### who made it; when ###", "q/1": "3, 1", "q/2": "Rome"}
    for call in found.calls.values():
        before = forest.calls[call.id]
        assert call.completion_tokens == len(call.completion_ids) and call.completion_ids[-1] == END
        assert call.logprobs is None, "the sampler's belong to other tokens"
        assert call.sampled_ids == before.completion_ids and call.text == before.text
        assert call.prompt_ids == before.prompt_ids
    # Reading the canonical text gives what reading the sampled text gave.
    assert parse_queries(trained(found)["q/0"]) == parse_queries(forest.calls["q/0"].text)
    assert parse_selection(trained(found)["q/1"], 4).indices == (3, 1)
    assert parse_answer(trained(found)["q/2"]) == "Rome"


def test_what_has_no_canonical_text_stays_as_sampled():
    forest = forest_of(("rewriter", "no block"), ("reranker", "none"), ("answerer", " "))
    assert reserialised(forest, PROGRAM, letters, END) == forest
    forest = forest_of(("rewriter", "### a; b ###"))
    assert reserialised(forest, PROGRAM, letters, END) == forest, "canonical already: nothing to recompute"
    failing = forest_of(("answerer", "*Rome*"))
    failing = replace(failing, calls={k: replace(call, ok=False) for k, call in failing.calls.items()})
    assert reserialised(failing, PROGRAM, letters, END) == failing


def test_dspy_programs_write_with_their_adapter():
    program = DspyProgram(dspy.ChainOfThought("text -> idea"))
    said = "Well\n[[ ## reasoning ## ]]\n\n  because \n[[ ## idea ## ]]   go\n\n[[ ## completed ## ]] and so on"
    grow = Grow(program.modules)
    grow.call("q/0", None, "predict", len(said), completion_ids=letters(said), text=said)
    grow.call("q/1", None, "predict", 3, completion_ids=letters("???"), text="???", example="q")
    found = reserialised(grow.forest, program, letters, END)
    text = trained(found)["q/0"]
    assert text == "[[ ## reasoning ## ]]\nbecause\n\n[[ ## idea ## ]]\ngo\n\n[[ ## completed ## ]]\n"
    signature = dict(program.module.named_predictors())["predict"].signature
    assert dspy.ChatAdapter().parse(signature, text) == {"reasoning": "because", "idea": "go"}
    assert found.calls["q/1"].completion_ids == letters("???"), "what does not parse is left as it was"


def test_programs_without_the_hook_are_refused(capsys, tmp_path, monkeypatch):
    assert isinstance(PROGRAM, Canonical) and not isinstance(Chain(), Canonical)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "algo=mmgrpo", "task=search_agent", "algo.reserialise=true"]) == 2
    assert "algo.reserialise: task search_agent has no canonical text" in capsys.readouterr().err
    assert main(["train", "algo=grpo", "algo.reserialise=true"]) == 2
    assert "it is an option of mmgrpo" in capsys.readouterr().err
