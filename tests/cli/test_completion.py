import shutil
import subprocess

import pytest

from mmrl.cli import candidates, main
from mmrl.cli.commands import COMMANDS


@pytest.fixture
def runs(tmp_path, monkeypatch):
    for name in ("hotpotqa/mhgpo_rr/one", "hotpotqa/grpo/two"):
        (tmp_path / "outputs" / name / "journal").mkdir(parents=True)
        (tmp_path / "outputs" / name / "config.yaml").write_text("{}")
    (tmp_path / "outputs" / "multirun" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return ["outputs/hotpotqa/grpo/two ", "outputs/hotpotqa/mhgpo_rr/one "]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mmrl tr", ["train "]),
        ("mmrl ", [f"{command} " for command in COMMANDS]),
        ("mmrl x", []),
        ("mmrl index ", ["build ", "check ", "info ", "search "]),
        ("mmrl index build retriever=d", ["retriever=dense "]),
        ("mmrl index build corp", ["corpus="]),
        ("mmrl index search index=x cand", ["candidates="]),
        ("mmrl train algo=mhgpo_f", ["algo=mhgpo_fof ", "algo=mhgpo_fof_os "]),
        ("mmrl train algo=grpo train.warmup", ["train.warmup_steps= "]),
        ("mmrl train res", ["resume="]),
        ("mmrl train exp", ["experiment="]),
        ("mmrl eval spl", ["split="]),
        ("mmrl eval split=t", ["split=test ", "split=train "]),
        ("mmrl new-task x kind=", ["kind=async ", "kind=dspy "]),
        ("mmrl show x st", ["step="]),
        ("mmrl nothing x", []),
        ("mmrl train 'a b", []),
    ],
)
def test_each_command_has_candidates_of_its_own(line, expected, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    found = candidates(line)
    assert [word.replace("= ", "=") for word in found] == [word.replace("= ", "=") for word in expected]
    assert capfd.readouterr() == ("", "")


def test_run_directories(runs, capfd):
    assert [word for word in candidates("mmrl show ") if "=" not in word] == runs
    assert candidates("mmrl show outputs/hotpotqa/g") == runs[:1]
    assert candidates("mmrl train resume=outputs/hotpotqa/m") == [f"resume={runs[1]}"]
    assert candidates("mmrl eval policy=") == [f"policy={run}" for run in runs]
    assert candidates("mmrl report outputs/mul") == ["outputs/multirun/"]
    assert capfd.readouterr() == ("", "")


def test_a_shell_gets_what_it_asks_for(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COMP_LINE", "mmrl tra and more")
    monkeypatch.setenv("COMP_POINT", "8")
    assert main(["-sc", "query=bash"]) == 0 and capsys.readouterr().out == "train \n"
    assert main(["-sc", "query=fish"]) == 0 and capsys.readouterr().out == "train\n"
    for shell in ("bash", "zsh", "fish"):
        assert main(["-sc", f"install={shell}"]) == 0 and "mmrl -sc query=" in capsys.readouterr().out
        assert main(["-sc", f"uninstall={shell}"]) == 0 and "_mmrl_completion" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself_completes(tmp_path, capsys):
    main(["-sc", "install=bash"])
    script = capsys.readouterr().out
    fake = tmp_path / "mmrl"
    fake.write_text('#!/bin/sh\necho "parse error" >&2\nprintf "train \\n"\n')
    fake.chmod(0o755)
    tab = 'COMP_LINE="mmrl tr" COMP_POINT=7 _mmrl_completion; printf "[%s]" "${COMPREPLY[@]}"'
    ask = f"PATH={tmp_path}:$PATH; {script}\n{tab}"
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[train ]", "")
