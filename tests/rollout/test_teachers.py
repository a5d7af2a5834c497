"""Rollouts of teachers: the teacher's inputs and outputs around the student's prompts, failures as they were."""

from dataclasses import dataclass, replace

import pytest

from mmrl.algorithms import ALGORITHMS
from mmrl.config import ModelConfig
from mmrl.config.algo import MmgrpoConfig
from mmrl.config.teacher import TeacherConfig
from mmrl.errors import ParseFailure
from mmrl.models.load import load_tokenizer
from mmrl.rollout.environment import Teacher
from mmrl.rollout.teachers import LoadedTeacher, teachers_of_step
from mmrl.tasks.dspy.own import FunctionProgram
from scripts.models.templates import save_tokenizer
from tests.helpers.programs import Chain, FakeEngine, FakeTask, environment, forest_of, letters, seeded_letter, spelled


@dataclass
class Instructed(Chain):
    """As `Chain`, with instructions before every prompt, and a parser that refuses `!`."""

    instructions: str = ""
    extra: bool = False

    async def run(self, example, ctx):
        text = example.inputs["text"]
        for module in (*self.modules, *("a" * self.extra)):
            shown = f"{self.instructions}{module}:{text}"
            reply = await ctx.call(module, [{"role": "user", "content": shown}], parse=self.parse)
            text += reply.text
            text += await ctx.tool("echo", text=reply.text)
        return text

    @staticmethod
    def parse(text):
        if "!" in text:
            raise ParseFailure("no exclamations", present=1, expected=2)
        return text


def run(
    teacher_program=None, teacher_answer=lambda request: "T" + request.module, student=None, counts=(2, 1), **teacher
):
    echoes = []
    tools = {"echo": lambda text: echoes.append(text) or "+"}
    task = FakeTask(student or Instructed(), tools=tools)
    engine, other = FakeEngine(seeded_letter), FakeEngine(teacher_answer)
    env = environment(task, engine)
    own = environment(replace(task, program=teacher_program or Instructed(instructions="be wise ")), other)
    env.teachers = {"wise": Teacher(environment=own, **{"student_ids": lambda ids, *_: ids, **teacher})}
    algo = MmgrpoConfig(
        name="mmgrpo",
        rollouts=sum(counts),
        teachers=(
            TeacherConfig(name="student", rollouts=counts[0]),
            TeacherConfig(name="wise", prompts="p", rollouts=counts[1]),
        ),
    )
    plan = ALGORITHMS["mmgrpo"].plan(algo, task.program.modules, (0, 1, "q0"))
    forest = forest_of(env, task.examples("train")[:2], plan)
    assert engine.live == other.live == 0
    return forest, engine, other, echoes


def test_a_teachers_answers_stand_behind_the_students_prompts():
    forest, engine, other, echoes = run()
    teacher_rollouts = [rollout for rollout in forest.rollouts if rollout.teacher]
    assert [rollout.teacher for rollout in forest.rollouts] == [None, None, "wise"] * 2, "teacher-major"
    assert len(teacher_rollouts) == 2 and len(other.requests) == 6 and len(engine.requests) == 12
    for rollout in teacher_rollouts:
        path = forest.path(rollout)
        assert [call.module for call in path] == ["a", "b", "c"] and [call.text for call in path] == ["Ta", "Tb", "Tc"]
        assert all(call.teacher == "wise" and call.logprobs is None and call.policy_version is None for call in path)
        assert all(spelled(call.prompt_ids).startswith(f"{call.module}:train") for call in path), "no instructions"
        assert spelled(path[2].prompt_ids).endswith("Ta+Tb+"), "the teacher's outputs are in the student's prompts"
        assert rollout.prediction.endswith("Ta+Tb+Tc+") and rollout.reward is not None
    assert all(spelled(request.prompt_ids).startswith("be wise ") for request in other.requests)
    assert len(echoes) == 18, "a tool is run once for each rollout: the student's program is given what it returned"
    assert all(call.logprobs is not None for call in forest.calls.values() if call.teacher is None)


def test_another_vocabulary_is_spelled_again():
    forest, *_ = run(student_ids=lambda ids, text, *_: letters(text.lower()))
    assert {call.text for call in forest.calls.values() if call.teacher} == {"ta", "tb", "tc"}


@pytest.mark.parametrize(
    ("template", "text", "finish", "begins", "written"),
    [
        ("gptoss", "In Ulm.", "eos", True, "<|channel|>final<|message|>In Ulm.<|return|>"),
        ("gptoss", "In U", "length", True, "<|channel|>final<|message|>In U"),
        ("gptoss", " In Ulm.", "eos", False, " In Ulm.<|return|>"),
        ("qwen3_5_think", "<think>\nUlm?\n</think>\n\nIn Ulm.", "eos", True, "Ulm?\n</think>\n\nIn Ulm.<|im_end|>"),
        ("qwen3_5_think", "<think>\nUlm", "length", True, "Ulm"),
        ("qwen2_5", "In Ulm.", "eos", True, "In Ulm.<|im_end|>"),
    ],
)
def test_a_text_is_trained_as_the_students_template_writes_a_reply(template, text, finish, begins, written, tmp_path):
    teacher, tokenizer = strange(template, tmp_path)
    teacher.refuse("Ulm?</think>" + text)
    assert tokenizer.decode(list(teacher.student_ids((), text, finish, begins))) == written


def strange(template, folder):
    """A teacher of other tokens than those of a student with a chat template of TRL's, and the student's tokenizer."""
    save_tokenizer(template, folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer(ModelConfig(name="x", path=str(folder), thinking=template == "qwen3_5_think"))
    task, engine = FakeTask(Instructed()), FakeEngine(seeded_letter)
    loaded = LoadedTeacher(task=task, engine=engine, tokenizer=tokenizer, shares_vocabulary=False)
    return teachers_of_step({"wise": loaded}, environment(task, engine).settings, (0, 1), tokenizer)["wise"], tokenizer


def test_a_text_that_would_be_thoughts_without_an_end_is_not_trained(tmp_path):
    teacher, _ = strange("qwen3_5_think", tmp_path)
    forest, *_ = run(teacher_answer=lambda request: "b</think>" * (request.module != "b"), refuse=teacher.refuse)
    failed = [rollout for rollout in forest.rollouts if rollout.teacher]
    assert [(rollout.error, rollout.reward) for rollout in failed] == [("engine", None)] * 2
    assert failed[0].error_message == (
        "algo.teachers: wise: prompts of the model's chat template end inside of thoughts, and the reply has no "
        "</think>; use model.thinking=false, or replies that begin with thoughts and </think>"
    )


def test_a_teachers_parse_failure_ends_its_rollout_and_is_trained():
    forest, *_ = run(teacher_answer=lambda request: "!" if request.module == "b" else "x")
    (first, _) = [rollout for rollout in forest.rollouts if rollout.teacher]
    path = forest.path(first)
    assert first.error == "parse" and first.reward == 0.0
    assert [(call.module, call.ok) for call in path] == [("a", True), ("b", False)]
    assert (path[1].present_fields, path[1].expected_fields, path[1].text) == (1, 2, "!")
    assert path[1].teacher == "wise" and path[1].logprobs is None


def test_outside_failures_of_a_teacher_are_never_credited():
    def broken(request):
        raise OSError("no such host")

    forest, *_ = run(teacher_answer=broken)
    failed = [rollout for rollout in forest.rollouts if rollout.teacher]
    assert [(rollout.error, rollout.reward, rollout.leaf) for rollout in failed] == [("engine", None, None)] * 2
    assert "no such host" in failed[0].error_message


def test_a_crash_of_the_teachers_own_code_is_its_own():
    async def crashes(example, ctx):
        await ctx.call("a", [{"role": "user", "content": "?"}])
        raise KeyError("oops")

    forest, *_ = run(teacher_program=FunctionProgram(crashes, ("a",)))
    failed = [rollout for rollout in forest.rollouts if rollout.teacher]
    assert [rollout.error for rollout in failed] == ["program", "program"] and "oops" in failed[0].error_message


def test_a_student_that_asks_for_what_the_teacher_never_said_has_diverged():
    forest, *_ = run(student=Instructed(extra=True))
    failed = [rollout for rollout in forest.rollouts if rollout.teacher]
    assert [(rollout.error, rollout.reward) for rollout in failed] == [("replay", None)] * 2
    assert "call 1 of module 'a', which teacher 'wise' never made" in failed[0].error_message
    assert all(rollout.error is None for rollout in forest.rollouts if rollout.teacher is None)


@pytest.mark.parametrize(
    ("teachers", "says"),
    [
        (({"name": "a", "prompts": "p", "rollouts": 3},), r"got 1 with \[3\] rollouts"),
        (({"name": "a", "prompts": "p", "rollouts": 2}, {"name": "student"}), "or for none"),
        (({"name": "a", "prompts": "p"}, {"name": "a", "policy": "tiny"}), "a different name for each"),
        (
            tuple({"name": f"t{i}", "prompts": "p"} for i in range(3)),
            "rollouts=4, or for none and a number of teachers that divides it",
        ),
        (({"name": "a"},), "got neither policy, endpoint nor prompts for 'a'; set one, or name it student"),
        (({"name": "student", "policy": "tiny"},), "leave them out"),
        (({"name": "a", "prompts": "p", "rollouts": 0}, {"name": "student", "rollouts": 4}), "greater than or equal"),
        ((), "got 0 with"),
    ],
)
def test_teachers_that_do_not_add_up_are_refused(teachers, says):
    with pytest.raises(ValueError, match=says):
        MmgrpoConfig(name="mmgrpo", rollouts=4, teachers=teachers)
