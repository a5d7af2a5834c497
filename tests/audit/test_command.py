"""`mmrl audit` on an enumerated program: from words to files, killed and continued, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import mmrl.audit.ledger as ledger
import mmrl.system.files as files
from mmrl.audit import critic
from mmrl.audit.plays import Plays
from mmrl.cli import main
from mmrl.errors import JudgeFailure
from tests.helpers.tabular import TABLES, TableTask
from tests.helpers.tabular_model import saved

SMALL = (
    "examples=4",
    "decisions=3",
    "continuations=4",
    "batches=6",
    "budgets=1,2",
    "reference=32",
    "algo.group_size=4",
)
ROWS = "algo=grpo,mhgpo_is,mhgpo_rr"
MACHINE = ("hardware=cpu", "hardware.threads=1")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("audit")
    return folder, ["audit", *saved("two", folder), *MACHINE]


@pytest.fixture(autouse=True)
def there(words: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(words[0])


@pytest.fixture(scope="module")
def result(words: tuple[Path, list[str]]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(words[0])
        assert main([*words[1], ROWS, *SMALL, "out=whole"]) == 0
    found: dict[str, Any] = json.loads((words[0] / "whole/audit.json").read_text())
    return found


def test_every_decision_has_its_truth_and_each_rows_credit(result: dict[str, Any]) -> None:
    table = TABLES["two"]
    assert {name: facts["decisions"] for name, facts in result["modules"].items()} == {"first": 6, "second": 6}
    assert list(result["rows"]) == ["grpo", "mhgpo_is", "mhgpo_rr"]
    for one in result["decisions"]:
        assert one["rows"].keys() == result["rows"].keys()
        # Between the least and the most that a call can be worth.
        number = int(one["example"].removeprefix("train"))
        ds = [table.d(number, h, r) for h in table.histories for r in range(len(table.logits(h)))]
        assert min(ds) - 4 * one["error"] < one["difference"] < max(ds) + 4 * one["error"]
    # Independent rollouts credit every call; independent sampling those at its own fork alone.
    assert result["rows"]["grpo"]["not_credited"] == 0 < result["rows"]["mhgpo_is"]["not_credited"] < 1
    assert result["rows"]["grpo"]["calls"] == 4 * 4 * 2


def test_calls_are_those_of_the_plan(result: dict[str, Any]) -> None:
    # Of 4 examples: forks of 4 at the first module (8 calls), and at the second (1 + 4).
    assert result["rows"]["mhgpo_is"]["calls"] == 4 * (8 + 5) == result["unit"]
    assert result["rows"]["grpo"]["scored"] == 0


def test_page_and_table_have_every_row(
    result: dict[str, Any], words: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    # Again: nothing is played, the same is printed.
    before = (words[0] / "whole/audit.json").read_bytes()
    assert main([*words[1], ROWS, *SMALL, "out=whole"]) == 0
    printed = capsys.readouterr()
    assert "calls:" not in printed.err and (words[0] / "whole/audit.json").read_bytes() == before
    page = (words[0] / "whole/audit.html").read_text()
    for text in ("grpo", "mhgpo_is", "mhgpo_rr", "first", "second", "alignment 2"):
        assert text in printed.out and text in page
    assert page.count("<svg") >= 4 and "<script" not in page


@pytest.mark.parametrize("pieces", [2, 20])
def test_a_killed_audit_goes_on_to_the_same_bytes(
    pieces: int,
    result: dict[str, Any],
    words: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = words[0] / f"killed-{pieces}"
    written, append = 0, files.append_jsonl

    def killed(path: Path, records: Any) -> bytes:
        nonlocal written
        written += 1
        if written > pieces:
            with path.open("ab") as file:
                file.write(b'{"piece":"torn')
            raise KeyboardInterrupt
        return append(path, records)

    monkeypatch.setattr(ledger, "append_jsonl", killed)
    assert main([*words[1], ROWS, *SMALL, f"out={out}"]) == 130
    assert "continue with: mmrl audit task=tabular_two" in capsys.readouterr().err
    monkeypatch.setattr(ledger, "append_jsonl", append)
    assert main([*words[1], ROWS, *SMALL, f"out={out}"]) == 0
    assert (out / "audit.json").read_bytes() == (words[0] / "whole/audit.json").read_bytes()


CRITICS = (
    "algo=grpo,ppo,mappo",
    "grpo.algo.group_size=4",
    "ppo.train.lr=0.002",
    "mappo.algo.critic=head",
    "mappo.train.lr=0.01",
    *SMALL[:-1],
)


@pytest.mark.slow
def test_critics_are_fitted_once_and_an_audit_that_was_killed_takes_them(
    words: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed as it notes the first critic, whose file is there; and where both are noted."""
    monkeypatch.setattr(critic, "ROUNDS", 6)
    assert main([*words[1], *CRITICS, "out=critics"]) == 0
    printed, append = capsys.readouterr().out, files.append_jsonl
    found = json.loads((words[0] / "critics/audit.json").read_text())["rows"]
    lines = map(json.loads, (words[0] / "critics/work.jsonl").read_text().splitlines())
    pieces = {line["piece"]: line["numbers"] for line in lines}
    assert found["grpo"]["critic"] is None
    for name in ("ppo", "mappo"):
        fitted = found[name]["critic"]
        # 4 examples, one rollout of two calls each.
        batches, rest = divmod(fitted["calls"], 8)
        assert rest == 0 and critic.HELD_OUT + 3 * critic.ROUND <= batches <= critic.HELD_OUT + 6 * critic.ROUND
        first, *later = pieces[f"critic {name}"]["explained"]
        assert first < fitted["explained_variance"] == max(later) < 1
        assert found[name]["calls"] == 8 and found[name]["not_credited"] == 0
        assert found[name]["explained_variance"] is not None
        assert f"8 + {fitted['calls']}" in printed and f"{name}: its critic was fitted here" in printed
    for piece in ("critic ppo", "unit"):
        out = words[0] / f"critics-{piece.replace(' ', '-')}"

        def killed(path: Path, records: Any, at: str = piece) -> bytes:
            if records[0]["piece"] == at:
                raise KeyboardInterrupt
            return append(path, records)

        monkeypatch.setattr(ledger, "append_jsonl", killed)
        assert main([*words[1], *CRITICS, f"out={out}"]) == 130
        monkeypatch.setattr(ledger, "append_jsonl", append)
        if piece == "unit":
            monkeypatch.setattr(critic, "fit", None)  # never again
        assert main([*words[1], *CRITICS, f"out={out}"]) == 0
        assert (out / "audit.json").read_bytes() == (words[0] / "critics/audit.json").read_bytes()
    capsys.readouterr()
    assert main([*words[1], *CRITICS, "ppo.train.weight_decay=0.1", "out=critics"]) == 2
    assert "out: critics has an audit with other settings" in capsys.readouterr().err


def test_failures_from_outside_are_counted_and_in_no_number(
    words: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A judge that never answers for one of the six ways to play."""
    honest, batch, failed = TableTask.score, Plays.batch, dict[int, int]()

    def score(self: TableTask, example: Any, prediction: Any, *rest: Any) -> Any:
        if prediction == [1, 2]:
            raise JudgeFailure("gone")
        return honest(self, example, prediction, *rest)

    def counted(self: Plays, row: Any, number: int) -> Any:
        found = batch(self, row, number)
        failed[number] = sum(rollout.reward is None for rollout in found[0].rollouts)
        return found

    monkeypatch.setattr(TableTask, "score", score)
    monkeypatch.setattr(Plays, "batch", counted)
    assert main([*words[1], "algo=grpo", *SMALL, "out=judge"]) == 0
    result = json.loads((words[0] / "judge/audit.json").read_text())
    assert result["rows"]["grpo"]["failed"] == sum(failed.values()) > 0
    assert f"grpo: {sum(failed.values())} rollouts of its batches failed" in capsys.readouterr().out
    # No sample of the truth, and no rollout of the reference, has an outcome of its own.
    pieces = {
        one["piece"]: one["numbers"]
        for one in map(json.loads, (words[0] / "judge/work.jsonl").read_text().splitlines())
    }
    table, drawn = TABLES["two"], Counter[float]()
    for block in range(16):
        for example, values in pieces[f"reference {block}"].items():
            number = int(example.removeprefix("train"))
            ways = {table.outcome(number, (a, b)) for a in range(2) for b in range(3) if (a, b) != (1, 2)}
            assert ways.issuperset(values)
            drawn.update(values)
    assert result["failed"]["rollouts of the reference"] == 4 * 32 - drawn.total()


def test_where_a_judge_is_gone_an_audit_stops_and_goes_on_when_it_is_back(
    result: dict[str, Any],
    words: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the start, and after some of the truth: nothing of what failed is noted."""
    for scored in (0, 20):
        left, honest, out = [scored], TableTask.score, words[0] / f"gone-{scored}"

        def score(self: TableTask, *given: Any, left: list[int] = left, honest: Any = honest) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise JudgeFailure("gone fishing")
            return honest(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(TableTask, "score", score)
            assert main([*words[1], ROWS, *SMALL, f"out={out}"]) == 1
        printed = capsys.readouterr().err
        assert "from outside causes, more than train.max_failed_share=50%" in printed and "gone fishing" in printed
        assert "continue with: mmrl audit" in printed
        assert main([*words[1], ROWS, *SMALL, f"out={out}"]) == 0
        assert (out / "audit.json").read_bytes() == (words[0] / "whole/audit.json").read_bytes()


def test_a_folder_of_other_settings_or_other_paths_is_refused(
    result: dict[str, Any], words: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words[1], ROWS, *SMALL, "seed=1", "out=whole"]) == 2
    assert "out: whole has an audit with other settings" in capsys.readouterr().err
    copy = words[0] / "copied"
    shutil.copytree(words[0] / "whole", copy)
    lines = (copy / "work.jsonl").read_text().splitlines()
    changed = [line.replace('"digest":"', '"digest":"0') for line in lines if '"piece":"done"' not in line]
    (copy / "work.jsonl").write_text("\n".join(changed) + "\n")
    assert main([*words[1], ROWS, *SMALL, f"out={copy}"]) == 2
    assert "has made other calls than before" in capsys.readouterr().err
    (words[0] / "full").mkdir()
    (words[0] / "full/notes.txt").write_text("mine")
    assert main([*words[1], ROWS, *SMALL, "out=full"]) == 2
    assert "out: full is not empty, and no audit" in capsys.readouterr().err
    assert (words[0] / "full/notes.txt").read_text() == "mine"
    assert main([*words[1], ROWS, *SMALL, "out=full/notes.txt"]) == 2
    assert "out: full/notes.txt is a file, expected a folder" in capsys.readouterr().err


REFUSED = [
    ("algo=grpo,grpo", "algo: got grpo more than once"),
    ("algo=nope", "algo: got 'nope', expected one of"),
    ("algo=grpo continuations=1", "continuations: got '1', expected greater than or equal to 2"),
    ("algo=grpo batches=2", "batches: got '2', expected greater than or equal to 3"),
    ("algo=grpo batches=8 budgets=1,4", "budgets: got 4, of which batches=8 has 2", "expected batches=12 or more"),
    ("algo=grpo budgets=0", "budgets: got '0', expected greater than or equal to 1", ""),
    ("algo=", "algo: got [], expected at least 1", ""),
    ("algo=grpo budgets=2,3", "budgets: got 2,3, expected each to be a multiple of the one before"),
    ("algo=grpo reference=40", "reference: got 40, expected a multiple of 16, at least 32"),
    ("algo=grpo examples=5", "examples: got 5, the train split has 4"),
    ("algo=grpo,ppo ppo.algo.critic_lr_factor=0", "ppo.algo.critic_lr_factor: got 0.0 with train.lr=", "for ppo"),
    ("algo=grpo,ppo train.lr=1e-3", "train.lr: has no effect"),
    ("algo=ppo ppo.train.steps=3", "ppo.train.steps: has no effect"),
    ("algo=grpo,dr_mas grpo.algo.nope=1", "error: grpo.algo.nope: unknown key"),
    ("algo=ppo algo.minibatches=1", "algo.minibatches: has no effect"),
    ("algo=grpo train.lr=1", "train.lr: has no effect on mmrl audit"),
    ("algo=grpo eval.items=2 algo.beta=0.1", "eval.items: has no effect", "algo.beta: has no effect"),
    ("algo=grpo,dr_mas grpo.algo.temperature=0.5", "grpo.algo.temperature: got 0.5 (grpo), 1.0 (dr_mas)"),
    ("algo=grpo,distill algo.distill={first:policy} algo.distill_kl=exact", "algo.distill_kl: got exact for"),
    ("algo=grpo,ccpo truth=reward", "truth: got reward, and the reward of ccpo is made of second plays"),
    ("algo=grpo,mhgpo_fof truth=reward", "truth: got reward, and the rows optimise different ones"),
    ("algo=grpo,dr_mas dr_mas.task.max_tokens=2", "dr_mas.task: is another than that of grpo"),
    ("algo=mhgpo_fof,grpo mhgpo_fof.algo.freeze_modules=[first]", "out of the loss (mhgpo_fof: first; grpo: none)"),
    ("algo=mmgrpo,grpo mmgrpo.model.lora.r=4", "grpo.model: is another than that of mmgrpo"),
    ("algo=grpo,sft", "algo: sft gives calls no credit"),
    ("algo=grpo policy=nowhere", "policy: nowhere"),
    ("algo=mt_grpo", "algo: mt_grpo needs a task with turn rewards"),
]


@pytest.mark.parametrize("typed, texts", [(typed, texts) for typed, *texts in REFUSED], ids=[c[0] for c in REFUSED])
def test_mistakes_are_named_before_anything_is_played(
    typed: str, texts: list[str], words: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    more = [] if "examples=" in typed else ["examples=4"]
    assert main([*words[1], *more, *typed.split(), "out=never"]) == 2
    printed = capsys.readouterr().err
    assert all(text in printed for text in texts), printed
    assert not (words[0] / "never").exists()
