"""A run with teachers and canonical text: from the config to what is journalled and trained."""

from mmrl.cli import main
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir
from tests.engines.test_endpoint import answers
from tests.helpers.runs import command
from tests.helpers.servers import serving

PROMPTS = "answerer:\n  system: 'One word.'\n"


def arguments(random_model, tmp_path, teachers, *more):
    options = ["algo=mmgrpo", "algo.rollouts=4", f"algo.teachers={teachers}", "train.steps=1", "eval.every=0", *more]
    base = command(random_model, tmp_path / "run", *options)
    return [argument for argument in base if not argument.startswith("algo.group_size")]


def test_a_run_with_teachers_trains_on_the_students_prompts(random_model, tmp_path):
    prompts = tmp_path / "terse.yaml"
    prompts.write_text(PROMPTS)
    teachers = (
        f"[{{name:student,rollouts:1}},{{name:terse,prompts:{prompts},rollouts:1}},"
        f"{{name:frozen,policy:{random_model},rollouts:2}}]"
    )
    assert main(arguments(random_model, tmp_path, teachers, "algo.reserialise=true")) == 0
    run = RunDir.read(tmp_path / "run")
    forest, entries = read_step(run, 1)
    names = [rollout.teacher for rollout in forest.rollouts]
    assert names == [None, "terse", "frozen", "frozen"] * 2
    for rollout in forest.rollouts:
        path = forest.path(rollout)
        assert [call.module for call in path] == ["rewriter", "reranker", "answerer"]
        assert all(call.teacher == rollout.teacher for call in path)
        assert not any("One word." in call.prompt_text for call in path)
        assert all((call.logprobs is None) for call in path if call.teacher or call.sampled_ids)
    rewritten = [call for call in forest.calls.values() if call.sampled_ids]
    assert rewritten and all(call.completion_ids != call.sampled_ids for call in rewritten)
    assert {forest.calls[e["call"]].teacher for e in entries if any(e["weights"])} == {None, "terse", "frozen"}
    record = run.history()[1]
    assert record["train/tokens"] > 0 and abs(record["train/ratio_mean"] - 1) < 1e-4, "old ones are recomputed"
    assert record["train/logprob_gap_max"] < 1e-4, "only tokens of the sampler have a gap"


def test_teachers_that_cannot_be_had_are_refused_together(random_model, tmp_path, capsys):
    strange = tmp_path / "strange.yaml"
    strange.write_text("judge:\n  system: x\n")
    teachers = f"[{{name:a,policy:./nowhere}},{{name:b,prompts:{strange}}}]"
    assert main(arguments(random_model, tmp_path, teachers)) == 2
    err = capsys.readouterr().err
    assert "algo.teachers: a: policy: got './nowhere'" in err and "algo.teachers: b: task.prompts" in err
    assert not (tmp_path / "run").exists()


def test_a_teacher_may_be_a_model_behind_an_endpoint(random_model, tmp_path, capsys):
    """Its text is trained on by the student's own log-probabilities, since an endpoint gives none."""

    with serving(answers) as (url, server):
        endpoint = f"{{url:'{url}',model:big,key_env:null,price_in:1000.0}}"
        teachers = f"[{{name:student,rollouts:2}},{{name:gpt,endpoint:{endpoint},rollouts:2}}]"
        assert main(arguments(random_model, tmp_path, teachers)) == 0
    run = RunDir.read(tmp_path / "run")
    forest, entries = read_step(run, 1)
    taught = [call for call in forest.calls.values() if call.teacher == "gpt"]
    assert {call.module for call in taught} == {"rewriter", "reranker", "answerer"}
    assert all(call.logprobs is None and call.text in ("1, 0", "Lulik") for call in taught)
    assert any(any(entry["weights"]) for entry in entries if forest.calls[entry["call"]].teacher == "gpt")
    record = run.history()[1]
    assert record["endpoint/requests"] == sum(seen.body is not None for seen in server.seen) - 1  # the look before
    assert record["endpoint/cost"] > 0
    assert abs(record["train/ratio_mean"] - 1) < 1e-4


def test_an_endpoint_without_thoughts_teaches_no_model_whose_prompts_open_them(random_model, tmp_path, capsys):
    template = tmp_path / "opening.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    with serving(answers) as (url, _):
        teachers = f"[{{name:student}},{{name:gpt,endpoint:{{url:'{url}',model:big,key_env:null}}}}]"
        assert main(arguments(random_model, tmp_path, teachers, f"model.chat_template={template}")) == 2
    assert (
        "algo.teachers: gpt: endpoint.reasoning: got drop, and prompts of the model's chat template end inside of "
        "thoughts, which such replies do not end; use keep, or model.thinking=false"
    ) in capsys.readouterr().err


def test_a_teacher_behind_an_endpoint_that_cannot_work_is_refused(random_model, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    cases = {
        "[{name:student},{name:gpt,endpoint:{model:big}}]": "algo.teachers: gpt.endpoint.key_env: the environment",
        "[{name:student},{name:gpt,policy:x/y,endpoint:{model:big}}]": "a policy and an endpoint for 'gpt'",
        "[{name:student,endpoint:{model:big}}]": "got endpoint for student, the policy in training; leave them out",
    }
    for teachers, says in cases.items():
        assert main(arguments(random_model, tmp_path, teachers)) == 2
        assert says in capsys.readouterr().err
