"""`mmrl credit run=RUN_DIR step=N` prints what the step was trained on, bit for bit: every algorithm, no model.

Steps are made by the weight stage itself, around rollouts of a small program with a scripted engine: what it hands to
the trainer is what the command has to print.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest

from mmrl import rng
from mmrl.algorithms import ALGORITHMS
from mmrl.cli import main
from mmrl.cli.configs import configured
from mmrl.errors import ToolFailure
from mmrl.records import Example
from mmrl.report.trackers import Trackers
from mmrl.run.settle import module_assignment
from mmrl.store.journal import read_step, write_step
from mmrl.store.rundir import RunDir
from mmrl.tasks.base import Score
from tests.helpers.configs import rl_stage_of
from tests.helpers.forests import REWARDED
from tests.helpers.programs import FakeEngine, FakeTask
from tests.helpers.runs import change_config

STEP = 7
POOL = [Example(id=f"q{number}", inputs={"text": f"t{number}"}) for number in range(12)]


@dataclass
class Agents:
    """Three modules, the second of which is called one to four times; a tool fails now and then."""

    modules: tuple[str, ...] = ("rewriter", "reranker", "answerer")

    async def run(self, example, ctx):
        text = example.inputs["text"]
        for module in ("rewriter", *["reranker"] * 4, "answerer"):
            if module == "reranker" and text[-1] < "g":
                continue
            text += (await ctx.call(module, [{"role": "user", "content": f"{module}:{text}"}])).text
            if text.endswith("q"):
                raise ToolFailure("down")
        return text


class Turns(FakeTask):
    """Rewards for whole rollouts and for every turn but the last."""

    def score(self, example, prediction, path, reward_set):
        score = super().score(example, prediction, path, reward_set)
        # A rollout in three has no tool result, so no turn reward.
        few = len(prediction) % 3 == 0
        turns = {} if few else {call.id: (ord(call.text[0]) % 5) / 10 for call in path[:-1]}
        return Score(reward=score.reward, metrics=score.metrics, turn_rewards=turns)


def letters_of(request):
    """One to six letters that depend on the request's seed alone."""
    stream = rng.stream(request.sampling.seed, "text")
    return "".join(stream.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(stream.randint(1, 6)))


def with_numbers(forest, critic):
    """Every call with the numbers of models that a critic's credit needs."""

    def numbers(call, kind, size):
        return tuple(rng.stream(kind, call.id, t).random() - 0.5 for t in range(size))

    calls = {
        name: replace(
            call,
            values=numbers(call, "value", call.completion_tokens + call.observation_tokens) if critic else None,
            ref_logprobs=numbers(call, "reference", call.completion_tokens),
            observation_tokens=0,
        )
        for name, call in forest.calls.items()
    }
    return replace(forest, calls=calls)


def trained(folder, *options):
    """A run directory with the journal of one step, and what the trainer was given."""
    config: Any = configured([*options, "train.batch_size=6"]).in_folder(str(folder))
    critic = ALGORITHMS[config.algo.name].needs_critic
    stage = rl_stage_of(config, FakeEngine(letters_of))
    stage.task, stage.examples = Turns(Agents()), POOL
    stage.assignment = module_assignment(config, stage.task.program.modules)
    with (
        RunDir.create(folder, config.model_dump(mode="json"), ["mmrl", "train"]) as run,
        patch("mmrl.stages.collect.annotate", lambda forwards, forest: with_numbers(forest, critic)),
    ):
        stage.log.rundir, stage.log.trackers = run, Trackers({})
        batch = stage.next_batch(STEP)
        stage.close()
    assert batch.calls
    return batch


def printed(capsys, folder, *options):
    """The calls that the command prints as JSON."""
    code = main(["credit", f"run={folder}", f"step={STEP}", "--json", *options])
    shown = capsys.readouterr()
    assert (code, shown.err) == (0, "")
    return json.loads(shown.out)["calls"]


def check_as_trained(folder, batch, capsys):
    found: dict[str, list[tuple]] = {}
    shown = printed(capsys, folder)
    for entry in shown:
        own = (entry["minibatch"], entry["module"], entry["advantages"], entry["weights"], entry["returns"])
        found.setdefault(entry["id"], []).append(own)
    given = {
        call.call.id: [
            (call.minibatch, call.call.module, list(e.advantages), list(e.weights), e.returns and list(e.returns))
            for e in call.entries
        ]
        for call in batch.calls
    }
    # By `repr` and not by `==`: the sign of a zero counts too.
    assert repr(found) == repr({name: given[name] for name in found}) and set(found) == set(given)
    return shown


SMALL = {"mmgrpo": ["algo.rollouts=4"], "ppo": [], "mt_ppo": [], "mappo": []}
TWO = "algo.minibatches=2"


@pytest.mark.parametrize("algo", REWARDED)
def test_a_step_of_every_algorithm_is_printed_as_it_was_trained(algo, tmp_path, capsys, output_of):
    options = [*SMALL.get(algo, ["algo.group_size=3"]), "seed=5"]
    batch = trained(tmp_path / "run", f"algo={algo}", *options, "algo.minibatches=3")
    shown = check_as_trained(tmp_path / "run", batch, capsys)
    assert {entry["minibatch"] for entry in shown} == {0, 1, 2}
    # The same step as a file: with as many mini-batches the same weights, with one of them others.
    file = f"rollouts={RunDir.read(tmp_path / 'run').journal_path(STEP)}"
    for count in (1, 3):
        text = output_of("credit", f"algo={algo}", *options, f"algo.minibatches={count}", file, "--json")
        weights = [entry["weights"] for entry in json.loads(text)["calls"]]
        assert (weights == [entry["weights"] for entry in shown]) == (count == 3)


CASES = {
    "frozen adapters": ["algo=grpo", "model.lora.r=4", "model.modules={reranker: {frozen: true}}", TWO],
    "frozen adapters, n of Eq. 6": ["algo=mhgpo_fof", "model.lora.r=4", "model.modules={reranker: {frozen: true}}"],
    "frozen modules": ["algo=mhgpo_rr", "algo.freeze_modules=[rewriter]", TWO],
    "trained modules": ["algo=mhgpo_is", "algo.train_modules=[rewriter,answerer]"],
    "an endpoint's module": ["algo=mappo", "+engine.endpoints={answerer: {model: gpt}}", "engine=transformers"],
    "random fillers": ["algo=mmgrpo", "algo.rollouts=6", "algo.group_size=3", "seed=3", TWO],
    "ragged groups": ["algo=mmgrpo", "algo.rollouts=4", "algo.padding_mode=ragged", "algo.loss_mean=token"],
    "Algorithm 3": ["algo=mhgpo_rr", "algo.regroup=alg3", "algo.group_size=2", "seed=9", TWO],
    "chunks of an agent": ["algo=mhgpo_rr", "algo.regroup=agent_chunks", "algo.group_size=2", "seed=9"],
    "random aggregation": ["algo=mhgpo_fof_os", "algo.aggregate=random", "algo.group_size=2", "seed=9"],
    "refilled": ["algo=grpo", "algo.group_size=2", "algo.zero_variance=refill", TWO],
    "scaled": ["algo=mt_grpo", "algo.advantage_scale={reranker: 0.5}", "algo.std_over=batch", "algo.alpha=0.9"],
    "a constant length": ["algo=mt_grpo_variable", "algo.loss_mean=constant", TWO],
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_step_with_options_is_printed_as_it_was_trained(options, tmp_path, capsys):
    check_as_trained(tmp_path / "run", trained(tmp_path / "run", *options), capsys)


@pytest.mark.parametrize("regroup", ["alg3", "agent_chunks"])
def test_what_show_writes_is_regrouped_as_the_run_was(regroup, tmp_path, capsys, output_of):
    """The file has the step, which the shuffle depends on; the rest is typed."""
    options = [f"algo.regroup={regroup}", "algo.group_size=2", "algo.minibatches=2", "seed=9"]
    trained(tmp_path / "run", "algo=mhgpo_rr", *options)
    shown = printed(capsys, tmp_path / "run")
    (tmp_path / "rollouts.json").write_text(output_of("show", str(tmp_path / "run"), f"step={STEP}", "--json"))
    words = ["credit", "algo=mhgpo_rr", *options, f"rollouts={tmp_path / 'rollouts.json'}", "--json"]
    assert json.loads(output_of(*words))["calls"] == shown
    assert any((entry["group"] or "").startswith("RR") for entry in shown)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The step of a run of mmGRPO, which no test changes."""
    folder = tmp_path_factory.mktemp("credit") / "run"
    trained(folder, "algo=mmgrpo", "algo.rollouts=6", "seed=3", "algo.minibatches=2")
    return folder


def test_a_runs_own_algorithm_keeps_its_settings_and_takes_those_that_are_typed(run, capsys):
    own = printed(capsys, run)
    assert printed(capsys, run, "algo=mmgrpo") == own
    assert printed(capsys, run, "algo.filler=max") == printed(capsys, run, "algo=mmgrpo", "algo.filler=max") != own
    whole = printed(capsys, run, "algo.minibatches=1")
    assert {entry["minibatch"] for entry in own} == {0, 1} and {entry["minibatch"] for entry in whole} == {0}
    assert printed(capsys, run, "seed=4") != own
    # mmGRPO of `conf/algo` would have drawn 12 rollouts; the run's six are all that there is.
    assert {entry["group_size"] for entry in own} == {6}


def test_other_algorithms_stand_beside_it_on_the_same_step(run, output_of):
    text = output_of("credit", f"run={run}", f"step={STEP}", "algo=mmgrpo,grpo", "algo.eps=0", "--json")
    own, other = json.loads(text)
    assert (own["algo"], other["algo"], own["step"]) == ("mmgrpo", "grpo", STEP)
    assert {entry["minibatch"] for entry in own["calls"]} == {0, 1}
    assert {entry["minibatch"] for entry in other["calls"]} == {0}, "conf/algo/grpo.yaml has one mini-batch"


def test_the_table_says_what_was_credited(run, output_of, monkeypatch):
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = output_of("credit", f"run={run}", f"step={STEP}").splitlines()
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines[:4]).split())
        assert "seed 3" in text and "mmgrpo: 2 mini-batches" in text and "· as trained" in text
        assert "not as trained" in " ".join(output_of("credit", f"run={run}", f"step={STEP}", "algo.eps=0.5").split())


def test_a_step_that_is_not_what_its_journal_says_is_told(run, tmp_path, capsys):
    changed = shutil.copytree(run, tmp_path / "run")
    change_config(changed, algo={"filler": "max"})
    assert main(["credit", f"run={changed}", f"step={STEP}"]) == 1
    shown = capsys.readouterr()
    assert "mmgrpo: " in shown.out and "entries differ from the journal's, the first of call q" in shown.err
    change_config(changed, algo={"filler": "randint"})
    forest, entries = read_step(RunDir.read(changed), STEP)
    write_step(RunDir.read(changed), forest, entries[1:])
    assert main(["credit", f"run={changed}", f"step={STEP}"]) == 1
    assert f"{len(entries)} entries, the journal has {len(entries) - 1}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run={run}/none step=7", "{run}/none: no such run directory"),
        ("run={run}/journal step=7", "not a run directory"),
        ("run={run} step=8", "step: got 8, expected a step that {run} has a journal of: 7 to 7"),
        ("run={run} step=x", "step: got 'x', expected integer"),
        ("run={run} step=7 rollouts=x", "rollouts: expected a file (rollouts=FILE) or a run (run=RUN_DIR), and not"),
        ("run={run} step=7 algo=grop", "did you mean 'grpo'"),
        ("run={run} step=7 algo.padding=ragged", "algo.padding: unknown key"),
        ("run={run} step=7 algo=grpo algo.filler=max", "algo.filler: has no effect with grpo"),
        ("run={run} step=7 algo.rollouts=1", "algo.rollouts: got 1"),
        ("run={run} step=7 algo.eps=1,2", "algo.eps: got several values"),
        ("run={run} step=7 ~algo.eps", "algo.eps: got None, expected"),
        ("run={run} step=7 algo.minibatches=9", "algo.minibatches: got 9, expected at most 6"),
        ("run={run} step=7 algo=ppo", "/0#0': values: missing"),
        ("run={run} step=7 seed=-1", "seed: got '-1', expected greater than or equal to 0"),
        ("run={run} step=7 run.name=x task=hover", "run.name: has no effect on mmrl credit"),
    ],
)
def test_mistakes(line, says, run, capsys):
    assert main(["credit", *line.format(run=run).split()]) == 2
    shown = capsys.readouterr()
    assert says.format(run=run) in shown.err and not shown.out and "Traceback" not in shown.err
