import pytest

from mmrl.cli import completion, main
from mmrl.cli.configs import configured
from mmrl.config.base import iter_leaves
from mmrl.system.files import plain
from tests.cli.test_cli import COMMANDS


def completed(line, monkeypatch, capsys):
    monkeypatch.setenv("_MMRL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        main([])
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        # bash hands a word over in parts, cut at its `=`
        ("mmrl train algo = mhgpo_f", ["mhgpo_fof", "mhgpo_fof_os"], ["mhgpo_rr"]),
        ("mmrl train algo =", ["grpo", "sft", "miprov2"], ["hotpotqa"]),
        # zsh and fish do not
        ("mmrl train algo=mhgpo_rr,gr", ["algo=mhgpo_rr,grpo", "algo=mhgpo_rr,grpo_mr"], ["algo=mhgpo_rr,mappo"]),
        ("mmrl train tr", ["train.steps=", "train.lr="], ["task="]),
        ("mmrl train task = dspy task.p", ["task.program=", "task.prompts="], ["task.data.train="]),
        ("mmrl train task = hotpotqa task.p", ["task.prompts="], ["task.program="]),
        ("mmrl eval task.retriever.", ["task.retriever.top_k="], []),
        ("mmrl train train.schedule = co", ["cosine", "constant"], ["linear"]),
        ("mmrl train model.gradient_checkpointing = ", ["true", "false"], []),
        ("mmrl plan dev", ["device="], []),
        ("mmrl compare set=m", ["set=mini"], ["set=tasks"]),
        ("mmrl index build sto", ["stopwords="], []),
        ("mmrl train resume = ", [], ["train.steps="]),
    ],
)
def test_a_shell_gets_keys_and_values(line, some, none, monkeypatch, capsys):
    found = completed(line, monkeypatch, capsys)
    assert set(some) <= set(found) and not set(none) & set(found)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mmrl tr", ["train"]),
        ("mmrl ", COMMANDS),
        ("mmrl index ", ["build"]),
        ("mmrl x", []),
    ],
)
def test_a_shell_gets_the_commands(line, expected, monkeypatch, capsys):
    assert sorted(completed(line, monkeypatch, capsys)) == sorted(expected)


def test_every_key_of_a_config_is_offered():
    """Those of a run's stored config, which has all of them."""
    words = ["algo=mhgpo_rr", "task=hotpotqa"]
    offered = completion.config_keys(words)
    stored = dict(iter_leaves(plain(configured(words).model_dump(mode="json"))))
    assert len(stored) > 100 and stored.keys() <= offered.keys()
