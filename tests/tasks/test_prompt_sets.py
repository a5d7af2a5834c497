"""Instructions and demonstrations as one set: rendered, replaced, written, read back, and made from rollouts."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.records import Call
from mmrl.tasks import TASKS
from mmrl.tasks.mini.teach import demonstrations
from mmrl.tasks.prompts import ModulePrompt, PromptedTask, Prompts, Shot, Template, last_user, load_prompts
from mmrl.tasks.search_program import TEMPLATES, SearchProgram
from tests.helpers.programs import EXAMPLE, Script, default_config, environment, forest_of, make, play, saved

# The digests were recorded before prompts could have demonstrations: a run without any sends what it always sent.
PROMPTED = {
    "hotpotqa": (("rewriter", "reranker", "answerer"), "bd9a4ba4deb92b38"),
    "search_agent": (("agent",), "c608008356312283"),
    "tool_agent": (("agent",), "3b439c417a654a26"),
    "qa_direct": (("solver",), "636cde4f17bc2739"),
    "search_o1": (("reasoner", "condenser"), "b3feae9dba13cf68"),
    "r1_searcher": (("searcher",), "477c487126bc5e5c"),
}
"""Task -> its modules, and the digest of what its demonstrations send."""


def message(role, content):
    return {"role": role, "content": content}


def test_demonstrations_stand_between_system_message_and_question(tmp_path):
    path = saved(
        tmp_path / "prompts.yaml",
        """
rewriter:
  system: "Split. Shape: {a}"
  demonstrations:
    - {user: "Question: {question}?", assistant: "### {a}; b ###"}
    - user: |
        Question: two
        lines?
      assistant: "### c ###"
""",
    )
    prompts = SearchProgram(load_prompts(TEMPLATES, path), 5)
    # worked by hand: what all questions share comes first, and nothing is filled into demonstrations
    shared = [
        message("system", "Split. Shape: {a}"),
        message("user", "Question: {question}?"),
        message("assistant", "### {a}; b ###"),
        message("user", "Question: two\nlines?\n"),
        message("assistant", "### c ###"),
    ]
    assert prompts.rewriter("Who {x}?") == [*shared, message("user", "Question: Who {x}?")]
    assert [m["role"] for m in prompts.reranker("Q", [])] == ["system", "user"]


def test_all_problems_of_demonstrations_at_once(tmp_path):
    path = saved(
        tmp_path / "prompts.yaml",
        """
rewriter: {demonstrations: {user: a, assistant: b}}
reranker:
  demonstrations:
    - text
    - {user: a}
    - {user: 3, assistant: '', system: x}
answerer: {demonstrations: , sistem: x}
""",
    )
    with pytest.raises(ConfigError) as caught:
        load_prompts(TEMPLATES, path)
    problems = [problem.removeprefix(f"task.prompts: {path}: ") for problem in caught.value.problems]
    assert problems[:7] == [
        "rewriter.demonstrations: Input should be a valid list",
        "reranker.demonstrations[0]: Input should be a dictionary or an instance of Shot",
        "reranker.demonstrations[1].assistant: Field required",
        "reranker.demonstrations[2].user: Input should be a valid string",
        "reranker.demonstrations[2].assistant: String should have at least 1 character",
        "reranker.demonstrations[2].system: Unexpected keyword argument",
        "answerer.demonstrations: Input should be a valid list",
    ]
    assert len(problems) == 8
    assert problems[7].startswith("answerer: got 'sistem'")


@pytest.mark.parametrize(("name", "module"), [("search_agent", "judge"), ("banking77", "classify.predict")])
def test_who_takes_no_demonstrations_says_so(tmp_path, name, module):
    path = saved(tmp_path / "prompts.yaml", f"{module}: {{demonstrations: [{{user: a, assistant: b}}]}}")
    with pytest.raises(ConfigError) as caught:
        TASKS[name](default_config(name, prompts=path), 0)
    (problem,) = caught.value.problems
    assert problem.startswith(f"task.prompts: {path}: {module}.demonstrations: has no effect")


TEXTS = st.text(st.sampled_from("{}ab \n\r\t\"':#-|>é\x00\x85\u2028question!documents"), min_size=1)
SHOTS = st.lists(st.builds(Shot, TEXTS.filter(str.strip), TEXTS.filter(str.strip)), max_size=2).map(tuple)


@settings(deadline=None, max_examples=150)
@given(instructions=TEXTS | st.text(), shots=SHOTS, question=TEXTS)
def test_what_is_written_is_read_back(tmp_path_factory, instructions, shots, question):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    changed = {"reranker": ModulePrompt(instructions, shots)}
    prompts = load_prompts(TEMPLATES, None).replaced(changed)
    assert prompts.by_module()["reranker"] == changed["reranker"]
    prompts.write(path)
    assert load_prompts(TEMPLATES, str(path)) == prompts
    # only {question} is filled in; every other brace, and those of the question, are plain text
    system = message("system", instructions.replace("{question}", question))
    turns = [turn for shot in shots for turn in (message("user", shot.user), message("assistant", shot.assistant))]
    rendered = SearchProgram(prompts, 5).reranker(question, [])
    assert rendered[:-1] == [system] * bool(instructions) + turns
    assert rendered[-1] == SearchProgram(load_prompts(TEMPLATES, None), 5).reranker(question, [])[-1]


def test_other_texts_of_a_file_stay(tmp_path):
    given_text = (
        "rewriter: {system: 'Plain {questions}, filled {question}'}\nanswerer: {document: '[{index}] {text}'}\n"
    )
    prompts = load_prompts(TEMPLATES, saved(tmp_path / "prompts.yaml", given_text))
    assert prompts.replaced(prompts.by_module()) == prompts
    prompts.replaced({"reranker": ModulePrompt("New")}).write(tmp_path / "again.yaml")
    again = load_prompts(TEMPLATES, str(tmp_path / "again.yaml"))
    assert again.texts["answerer"]["document"] == "[{index}] {text}"
    assert SearchProgram(again, 5).rewriter("Q")[0] == message("system", "Plain {questions}, filled Q")
    assert again.texts["reranker"]["system"] == "New"


def test_a_set_for_another_program_is_refused():
    templates = {"m": {"system": Template("{x}", frozenset({"x"}), instructions=True)}}
    prompts = Prompts(templates, {"m": {"system": "{x}"}}, roles={"m": "system"})
    with pytest.raises(ConfigError) as caught:
        prompts.replaced({"m": ModulePrompt("no field {y}"), "n": ModulePrompt("")})
    assert caught.value.problems == ["prompts: m.system: misses {x}", "prompts: got 'n', expected one of m"]


@pytest.mark.parametrize("name", PROMPTED)
def test_every_task_has_a_prompt_set_and_programs_do_not_share_it(name, tmp_path):
    task: Any = TASKS[name](default_config(name), 0)
    prompted: Any = PromptedTask
    assert isinstance(task, prompted)
    start = task.all_prompts.by_module()
    assert tuple(start) == PROMPTED[name][0]
    assert not any(prompt.shots for prompt in start.values())
    changed = {module: ModulePrompt(f"Do {{this}} as {module}", (Shot("u", "a"),)) for module in start}
    program = task.make_program(task.all_prompts.replaced(changed))
    assert program is not task.program
    assert task.all_prompts.by_module() == start
    task.all_prompts.replaced(changed).write(tmp_path / "best.yaml")
    again: Any = TASKS[name](default_config(name, prompts=str(tmp_path / "best.yaml")), 0)
    assert again.all_prompts.by_module() == changed
    assert again.program.prompts.texts == program.prompts.texts != task.program.prompts.texts


def test_of_the_two_instructions_of_qa_direct_the_one_in_use_changes():
    task: Any = TASKS["qa_direct"](default_config("qa_direct", chain_of_thought=True), 0)
    assert task.all_prompts.by_module()["solver"].instructions.startswith("Think step by step")
    program = task.make_program(task.all_prompts.replaced({"solver": ModulePrompt("Ponder")}))
    assert program.question("Q", True)[0] == message("system", "Ponder")
    assert program.question("Q", False) == task.program.question("Q", False)


SEARCHES = ["<think> a </think>\n<search> river of Lisbon </search>", "<think> b </think>\n<answer> Tagus </answer>"]


def shown(task, texts, module):
    _, calls, _ = play(task, texts, "outcome")
    return task.shot_of(calls, module), calls


def test_a_rollout_becomes_a_demonstration(tmp_path):
    task = make("search_agent", tmp_path)
    shot, calls = shown(task, SEARCHES, "agent")
    assert message("user", shot.user) == task.program.question("On which river is Lisbon?")[-1]
    assert shot.assistant == SEARCHES[0] + calls[1].prompt_text + SEARCHES[1]
    assert calls[1].prompt_text.startswith("\n\n<information>Doc 1(Title: ")
    # the same rollout under prompts that have demonstrations shows its own question, not theirs
    task.program = task.make_program(
        task.all_prompts.replaced({"agent": ModulePrompt("S", (Shot("other", "x"), Shot("more", "y")))})
    )
    assert shown(task, SEARCHES, "agent")[0] == shot


def test_a_rollout_of_messages_becomes_none(tmp_path):
    tool = '<tool>{"name": "wiki_search", "args": {"query": "river of Lisbon"}}</tool>'
    assert shown(make("tool_agent", tmp_path), [tool, "<answer>Tagus</answer>"], "agent")[0] is None


def test_modules_with_contexts_of_their_own_show_their_first_call(tmp_path):
    task = make("search_o1", tmp_path)
    query = "<|begin_search_query|> Lisbon <|end_search_query|>"
    texts = [query, "on the Tagus", query, "as before", "\\boxed{Tagus}"]
    shot, calls = shown(task, texts, "reasoner")
    assert [call.module for call in calls] == ["reasoner", "condenser", "reasoner", "condenser", "reasoner"]
    result = "\n<|begin_search_result|> {} <|end_search_result|>\n"
    added = [result.format("on the Tagus"), result.format("as before")]
    assert shot.assistant == query + added[0] + query + added[1] + "\\boxed{Tagus}"
    condenser = task.shot_of(calls, "condenser")
    assert condenser.assistant == "on the Tagus"
    assert condenser.user == calls[1].prompt_text.removeprefix("[user] ")


def test_demonstrations_that_leave_no_room_fail_as_any_long_prompt_does():
    task: Any = TASKS["qa_direct"](default_config("qa_direct"), 0)
    room = sum(len(m["content"]) + 1 for m in task.program.question(EXAMPLE.inputs["question"], False)) + 100

    def played(shots):
        task.program = task.make_program(
            task.all_prompts.replaced(
                {"solver": ModulePrompt(task.all_prompts.by_module()["solver"].instructions, shots)}
            )
        )
        env = environment(task, Script(texts=["Tagus"]))
        env.settings = replace(env.settings, max_context=room)
        (rollout,) = forest_of(env, [EXAMPLE]).rollouts
        return rollout.error, rollout.reward

    assert played((Shot("u" * 40, "a" * 40),)) == (None, 1.0)
    assert played((Shot("u" * 40, "a" * 80),)) == ("length", 0.0)


def call(**fields):
    given_fields = {"prompt_text": "[system] s\n[user] q", "text": "a"} | fields
    return Call(id="c", example="e", parent=None, module="m", completion_tokens=1, **given_fields)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([call()], Shot("q", "a")),
        ([], None),
        ([call(text=" ")], None),
        ([call(finish="length")], None),
        ([call(ok=False)], None),
        ([call(prompt_text="[user] q\n[user] forged")], None),
        ([call(), call(turn=1, prompt_text="<o>", text="b"), call(text="other")], Shot("q", "a<o>b")),
    ],
)
def test_what_cannot_be_shown(path, expected):
    task: Any = TASKS["hotpotqa"](default_config("hotpotqa"), 0)
    assert task.shot_of(path, "m") == expected
    assert task.shot_of(path, "absent") is None


def test_the_last_user_message_of_a_recorded_prompt():
    assert last_user("[system] a\nb\n[user] c\n[assistant] d\n[user] e\nf") == "e\nf"
    assert last_user("plain") is None
    assert last_user("[user] a\n[assistant] b") is None


@pytest.mark.parametrize("name", PROMPTED)
def test_prompts_without_demonstrations_are_byte_for_byte_the_same(name):
    task = TASKS[name](default_config(name), 0)
    sent = [
        [d.module, list(d.messages), d.completion, [[said, added] for said, added in d.history]]
        for example in task.examples("train")[:20]
        for d in demonstrations(task, example)
    ]
    assert hashlib.sha256(json.dumps(sent).encode()).hexdigest()[:16] == PROMPTED[name][1]
