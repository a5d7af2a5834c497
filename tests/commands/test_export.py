"""`mmrl export`: folders that other libraries load, that evaluate to the run's own numbers, and whole or absent."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load
from safetensors.torch import load_file

from mmrl.cli import main
from mmrl.config import ModelConfig
from mmrl.models.load import load_policy
from mmrl.models.save import write_tokenizer
from mmrl.store.journal import read_step
from mmrl.store.policy import EXTRA, resolve
from mmrl.store.rundir import RunDir
from mmrl.tasks.search_program import MultihopQaTask
from tests.helpers.runs import EVAL, change_config, command, flip, forge, score_of_texts

LORA = ["model.lora.r=4", "model.lora.alpha=8"]
MODULES = ("rewriter", "reranker", "answerer")


def trained(model: str, folder: Path, *extra: str) -> Path:
    """A run of two steps that move the greedy texts, so that the wrong weights say something else."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MultihopQaTask, "score", score_of_texts)
        assert main(command(model, folder, "algo=mhgpo_fof", "train.steps=2", "train.lr=0.1", *extra)) == 0
    return folder


@pytest.fixture(scope="module")
def by_module(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter for each module, of which one is frozen."""
    folder = tmp_path_factory.mktemp("export") / "modules"
    more = ["model.modules.reranker.frozen=true", "train.save_every=1", "eval.every=1", "train.keep=5"]
    return trained(random_model, folder, *LORA, *more)


@pytest.fixture(scope="module")
def shared(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one adapter for all modules."""
    return trained(random_model, tmp_path_factory.mktemp("export") / "shared", *LORA)


@pytest.fixture(scope="module")
def full(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all parameters, in which one module acts with the initial weights."""
    more = ["algo.freeze_modules=[rewriter]", "algo.frozen_serving=true"]
    return trained(random_model, tmp_path_factory.mktemp("export") / "full", *more)


def exported(run: Path, out: Path, *words: str) -> Path:
    assert main(["export", str(run), f"out={out}", *words]) == 0
    return out


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    """All that a policy says in a greedy evaluation; each policy is evaluated once."""

    @functools.cache
    def texts(policy: Path) -> list[str]:
        folder = tmp_path_factory.mktemp("said") / "eval"
        assert main(["eval", f"policy={policy}", f"run.dir={folder}", *EVAL]) == 0
        run = RunDir.read(folder)
        forest = read_step(run, run.journal_steps("dev")[0], evaluation="dev")[0]
        return [call.text for call in forest.calls.values()]

    return texts


@pytest.mark.parametrize(
    ("kind", "words"), [("shared", []), ("shared", ["form=adapter"]), ("by_module", []), ("full", [])]
)
def test_an_export_says_what_its_run_says(
    kind: str, words: list[str], request: Any, said: Any, random_model: str, tmp_path: Path
) -> None:
    """Every greedy text of `mmrl eval policy=EXPORT` is that of `policy=RUN`, and not the base model's."""
    run = request.getfixturevalue(kind)
    out = exported(run, tmp_path / "out", *words)
    assert said(out) == said(run) != said(Path(random_model))


def test_names_of_weights_cannot_lead_out_of_the_folder(by_module: Path, tmp_path: Path, errors_of: Any) -> None:
    run = shutil.copytree(by_module, tmp_path / "run")
    checkpoint = run / "checkpoints" / "checkpoint-2"
    shutil.copytree(checkpoint / "answerer", run / "outside")
    extra = json.loads((checkpoint / EXTRA).read_text())
    extra["modules"]["answerer"] = "../../outside"
    (checkpoint / EXTRA).write_text(json.dumps(extra))
    forge(checkpoint)
    said = errors_of("export", str(run), f"out={tmp_path}/a/b/out", "form=adapter")
    assert "modules.answerer: got '../../outside', expected the name of a folder in the checkpoint" in said
    assert not (tmp_path / "a").exists()


def test_a_damaged_file_that_the_card_reads_leaves_no_export(full: Path, tmp_path: Path, errors_of: Any) -> None:
    run = shutil.copytree(full, tmp_path / "run")
    (run / "environment.json").write_text('{"versions": null}')
    (line,) = errors_of("export", str(run), f"out={tmp_path / 'out'}").splitlines()
    assert line.startswith(f"error: {run}: cannot be shown (") and not (tmp_path / "out").exists()


def test_merged_weights_are_base_plus_adapter(by_module: Path, random_model: str, tmp_path: Path, capsys: Any) -> None:
    """W + (alpha / r) B A, in the base's type; of each trained module in a folder."""
    capsys.readouterr()
    one = exported(by_module, tmp_path / "one", "form=merged") / "answerer"
    assert f"merged into {random_model}, in its own type (float32)" in capsys.readouterr().out
    each = exported(by_module, tmp_path / "each", "form=merged")
    assert sorted(path.name for path in each.iterdir()) == ["README.md", "answerer", "rewriter"]
    adapter = load_file(by_module / "checkpoints" / "checkpoint-2" / "answerer" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    expected = load_file(Path(random_model) / "model.safetensors")[f"{name}.weight"] + 2.0 * b @ a
    for folder in (one, each / "answerer"):
        torch.testing.assert_close(load_file(folder / "model.safetensors")[f"{name}.weight"], expected)
    assert (one / "tokenizer.json").is_file() and (one / "chat_template.jinja").is_file()
    assert json.loads((one / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_a_base_in_bfloat16_stays_in_bfloat16(
    shared: Path, random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run computed in float32; what is merged has the type of the base's own files."""
    from transformers import AutoModelForCausalLM

    other = shutil.copytree(random_model, tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.bfloat16).save_pretrained(other)
    run = shutil.copytree(shared, tmp_path / "run")
    change_config(run, model={"path": str(other)})
    out = exported(run, tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_an_export_stops_where_the_policy_stops(
    shared: Path, full: Path, random_model: str, tmp_path: Path, capsys: Any
) -> None:
    """At the tokenizer's end of a turn (2), and at that of a generation config which does not name it (5)."""
    base = shutil.copytree(random_model, tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 5}')
    adapted, whole = shutil.copytree(shared, tmp_path / "a"), shutil.copytree(full, tmp_path / "w")
    for run in (adapted, whole):
        change_config(run, model={"path": str(base)})
    checkpoint = whole / "checkpoints" / "checkpoint-2"
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 5, "top_k": 3}')
    forge(checkpoint)
    capsys.readouterr()
    for run, name, more in ((adapted, "merged", {}), (whole, "full", {"top_k": 3})):
        written = json.loads((exported(run, tmp_path / name) / "generation_config.json").read_text())
        assert written["eos_token_id"] == [2, 5] and more.items() <= written.items()
    assert "eos_token_id=" not in capsys.readouterr().out
    exported(adapted, tmp_path / "adapter", "form=adapter")
    assert "give eos_token_id=[2, 5] to transformers, stop_token_ids=[2, 5] to vLLM" in capsys.readouterr().out


def test_an_adapter_is_used_with_the_tokenizer_in_its_folder(shared: Path, tmp_path: Path) -> None:
    """As it was exported, or as the user has changed it since; the base's is another."""
    out = exported(shared, tmp_path / "out", "form=adapter")
    template = (out / "chat_template.jinja").read_text() + "{# own #}"
    (out / "chat_template.jinja").write_text(template)
    policy = resolve(str(out))
    section = ModelConfig(name="x", path=policy.base, dtype="float32")
    assert load_policy(policy, section, "cpu")[1].chat_template == template


def test_a_choice_that_the_run_does_not_have_is_named(
    by_module: Path, full: Path, tmp_path: Path, errors_of: Any
) -> None:
    out = f"out={tmp_path / 'out'}"
    for run, choice, says in (
        (full, "form=adapter", "form: got adapter, and the run trained all parameters"),
        (by_module, "checkpoint=7", "has no complete checkpoint of step 7 (there are: 1, 2)"),
        (by_module, "checkpoint=newest", "got 'newest', expected last, best or a step"),
    ):
        assert says in errors_of("export", str(run), out, choice)
    assert "not a run directory" in errors_of("export", str(tmp_path), out)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_nothing_half_written(
    shared: Path, tmp_path: Path, errors_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    assert f"out: {mine} exists, and is left as it is" in errors_of("export", str(shared), f"out={mine}")
    assert list(mine.iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "x")
    assert f"error: out: {tmp_path / 'link'} exists" in errors_of("export", str(shared), f"out={tmp_path / 'link'}")
    (mine / "file").touch()
    assert f"out: cannot make {mine / 'file'}: " in errors_of("export", str(shared), f"out={mine / 'file' / 'out'}")

    def fails(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("mmrl.commands.export.model_card", fails)
    assert main(["export", str(shared), f"out={tmp_path / 'out'}"]) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "mine"]


def test_what_a_killed_export_has_left_is_named_and_stays(shared: Path, tmp_path: Path, capsys: Any) -> None:
    """Also that of an export which runs now would be so called."""
    for name in (".out-ab_9xyz0", ".out-two-ab_9xyz0", ".out-notes"):
        (tmp_path / name).mkdir()
    capsys.readouterr()
    exported(shared, tmp_path / "out", "form=adapter")
    warned = [line for line in capsys.readouterr().err.splitlines() if "was killed" in line]
    assert warned == [
        f"warning: {tmp_path}/.out-ab_9xyz0 is of an export that was killed; delete it, unless one runs now"
    ]
    assert len(list(tmp_path.iterdir())) == 4


def test_damage_is_refused_by_file(by_module: Path, tmp_path: Path, errors_of: Any) -> None:
    """A flipped bit of the weights; the checkpoint before it is exported."""
    run = shutil.copytree(by_module, tmp_path / "run")
    weights = run / "checkpoints" / "checkpoint-2" / "answerer" / "adapter_model.safetensors"
    flip(weights)
    error = errors_of("export", str(run), f"out={tmp_path / 'out'}")
    assert f"{weights} has not the content that was written; restore it, or take another checkpoint" in error
    exported(run, tmp_path / "one", "checkpoint=1")
    assert not (tmp_path / "out").exists()


def test_best_is_the_best_evaluated_step(by_module: Path, tmp_path: Path, capsys: Any) -> None:
    """Evaluated by the main metric; of a better step whose checkpoint is gone the user hears."""
    run = shutil.copytree(by_module, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, f1 in zip([line for line in lines if "eval/dev/f1" in line], (0.1, 0.9, 0.3), strict=True):
        line["eval/dev/f1"] = f1
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    exported(run, tmp_path / "best", "checkpoint=best")
    assert "best of the steps with a checkpoint: 1, f1 0.9000 on dev" in capsys.readouterr().out
    # The same before the run has a summary.
    (run / "summary.json").unlink()
    exported(run, tmp_path / "early", "checkpoint=best")
    assert "best of the steps with a checkpoint: 1, f1 0.9000 on dev" in capsys.readouterr().out
    shutil.rmtree(run / "checkpoints" / "checkpoint-1")
    exported(run, tmp_path / "left", "checkpoint=best")
    shown = capsys.readouterr().out
    assert "best of the steps with a checkpoint: 2" in shown and "exported step 2" in shown


def test_a_template_that_renders_other_ids_is_not_exported(shared: Path, tmp_path: Path, errors_of: Any) -> None:
    """The checkpoint's template is another one than the config trained with (both whole, by their digests)."""
    run = shutil.copytree(shared, tmp_path / "run")
    checkpoint = run / "checkpoints" / "checkpoint-2"
    template = checkpoint / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{ m.content }}", "{{ m.content | trim }}"))
    forge(checkpoint)
    error = errors_of("export", str(run), f"out={tmp_path / 'out'}")
    assert "its chat template gives other token ids than in training" in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_template_without_a_system_role_gets_one(random_model: str, tmp_path: Path) -> None:
    """The system text opens the user's turn; a conversation without one is rendered as before."""
    from transformers import AutoTokenizer

    base = shutil.copytree(random_model, tmp_path / "base")
    template = (base / "chat_template.jinja").read_text()
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    (base / "chat_template.jinja").write_text(refusing + template)
    plain = AutoTokenizer.from_pretrained(random_model)
    for name in ("base", "random"):
        (tmp_path / f"{name}-out").mkdir()
    write_tokenizer(base, [tmp_path / "base-out"])
    write_tokenizer(Path(random_model), [tmp_path / "random-out"])
    exported = AutoTokenizer.from_pretrained(tmp_path / "base-out")
    user, answer = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "He."}
    system, merged = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Be brief.\n\nWho?"}
    for given, expected in (([system, user, answer, user], [merged, answer, user]), ([user], [user])):
        texts = exported.apply_chat_template(given, tokenize=False), plain.apply_chat_template(expected, tokenize=False)
        assert texts[0] == texts[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "random-out").chat_template == template


def test_the_card_is_filled_in(by_module: Path, random_model: str, tmp_path: Path) -> None:
    """Data, algorithm, settings, numbers with intervals, seed, versions, base, licence; no folder of this machine."""
    out = exported(by_module, tmp_path / "out")
    card = (out / "README.md").read_text()
    head = metadata_load(out / "README.md")
    assert head is not None and head["library_name"] == "peft" and "mhgpo_fof" in head["tags"]
    metrics = {metric["type"]: metric["value"] for metric in head["model-index"][0]["results"][0]["metrics"]}
    last = RunDir.read(by_module).history()[-1]
    assert metrics["f1"] == pytest.approx(last["eval/dev/f1"], abs=1e-4)
    assert "license" not in head and "is not known to mmrl" in card
    for text in (
        "trained for 2 steps by reinforcement learning with `mhgpo_fof`",
        "| before | after | difference | 95 % interval |",
        "95 % bootstrap intervals",
        "| `reranker` | the base model",
        "LoRA, r 4, alpha 8",
        "| seed | 0 |",
        "they are not scores on the public data set",
        "the embedded mini world of mmrl (2400 examples)",
        "group_size: 2",
        "| mmrl | 0.1.0",
        "| command | `mmrl train",
    ):
        assert text in card, text
    assert str(Path(random_model).parent) not in card and str(by_module.parent) not in card
    assert "More Information Needed" not in card


def test_the_base_s_licence_is_the_card_s(random_model: str, tmp_path: Path) -> None:
    from mmrl.models.hub import licence_of

    assert licence_of("tiny") == "apache-2.0" and licence_of(random_model) is None
    (tmp_path / "README.md").write_text("---\nlicense: llama3.1\n---\n# A model\n")
    assert licence_of(str(tmp_path)) == "llama3.1"
    (tmp_path / "README.md").write_text("---\nlicense: [broken\n---\n")
    assert licence_of(str(tmp_path)) is None
