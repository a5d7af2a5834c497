"""`mmrl credit run=RUN_DIR step=N` prints what the step was trained on, bit for bit: every algorithm, no model.

Steps are made by the weight stage itself, around rollouts of a small program with a scripted engine: what it hands to
the trainer is what the command has to print.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import yaml

from mmrl import rng
from mmrl.algorithms import ALGORITHMS
from mmrl.cli import main
from mmrl.cli.hydra import configured
from mmrl.config import TrainCommandConfig
from mmrl.errors import ToolFailure
from mmrl.records import Example
from mmrl.report.rundir import RunDir
from mmrl.rollout.sample import sample
from mmrl.stages.collect import Prefetch, SampledBatch, dynamic_sampling
from mmrl.stages.step_log import StepLog
from mmrl.stages.weights import WeightStage
from mmrl.tasks.base import Score
from tests.helpers.fakes import FakeEngine, FakeTask, environment

STEP = 7
POOL = [Example(id=f"q{number}", inputs={"text": f"t{number}"}) for number in range(12)]
EXAMPLES = POOL[:5]


@dataclass
class Agents:
    """Three modules, the second of which is called once or twice; a tool fails now and then."""

    modules: tuple[str, ...] = ("rewriter", "reranker", "answerer")

    async def run(self, example, ctx):
        text = example.inputs["text"]
        for module in ("rewriter", "reranker", "reranker", "answerer"):
            reply = await ctx.call(module, [{"role": "user", "content": f"{module}:{text}"}])
            text += reply.text
            if text.endswith("q"):
                raise ToolFailure("down")
            if module == "reranker" and reply.text < "m":
                text += (await ctx.call("answerer", [{"role": "user", "content": text}])).text
                break
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
    config = configured(TrainCommandConfig, [*options, "train.batch_size=5"]).in_folder(str(folder))
    task = Turns(Agents())

    def roll_out(examples):
        key = (config.seed, STEP)
        plan = ALGORITHMS[config.algo.name].plan
        plans = [(e, plan(config.algo, task.program.modules, (*key, e.id))) for e in examples]
        forest = asyncio.run(sample(environment(task, FakeEngine(letters_of), key=key), plans, "outcome", STEP))
        return with_numbers(forest, ALGORITHMS[config.algo.name].needs_critic)

    def collect(step, credit):
        if getattr(config.algo, "zero_variance", "keep") == "refill":
            return dynamic_sampling(EXAMPLES, POOL, roll_out, credit, rounds=3, key=(config.seed, STEP))
        return SampledBatch(examples=tuple(EXAMPLES), forest=roll_out(EXAMPLES))

    from mmrl.run.build import module_assignment

    frozen = module_assignment(config.model, config.algo, task.program.modules, config.engine.endpoints).frozen
    with RunDir.create(folder, config.model_dump(mode="json"), ["mmrl", "train"]) as run:
        collector = SimpleNamespace(
            config=config,
            task=task,
            log=StepLog(rundir=run, progress=None, trackers=None),
            collect=collect,
            prefetch=Prefetch(),
        )
        stage = WeightStage(engines=[], collector=collector, evaluations=None, frozen=frozen)
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
    for entry in printed(capsys, folder):
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
    return found


SMALL = {"mmgrpo": ["algo.rollouts=4"], "ppo": [], "mt_ppo": [], "mappo": []}
TWO = "algo.minibatches=2"


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_a_step_of_every_algorithm_is_printed_as_it_was_trained(algo, tmp_path, capsys):
    batch = trained(tmp_path / "run", f"algo={algo}", *SMALL.get(algo, ["algo.group_size=3"]), "algo.minibatches=3", "seed=5")
    found = check_as_trained(tmp_path / "run", batch, capsys)
    assert {own[0] for entries in found.values() for own in entries} == {0, 1, 2}
    # The same step, read from its journal without the run, has one mini-batch: other weights.
    path = RunDir.read(tmp_path / "run").journal_path(STEP)
    options = [*SMALL.get(algo, ["algo.group_size=3"]), "seed=5"]
    whole, parts = [], []
    for target, count in ((whole, 1), (parts, 3)):
        assert main(["credit", f"algo={algo}", *options, f"algo.minibatches={count}", f"rollouts={path}", "--json"]) == 0
        target += json.loads(capsys.readouterr().out)["calls"]
    assert [entry["weights"] for entry in whole] != [entry["weights"] for entry in parts]
    assert [entry["weights"] for entry in parts] == [own[3] for entries in found.values() for own in entries]


CASES = {
    "frozen adapters": ["algo=grpo", "model.lora.r=4", "model.modules={reranker: {frozen: true}}", TWO],
    "frozen adapters, n of Eq. 6": ["algo=mhgpo_fof", "model.lora.r=4", "model.modules={reranker: {frozen: true}}"],
    "frozen modules": ["algo=mhgpo_rr", "algo.freeze_modules=[rewriter]", TWO],
    "trained modules": ["algo=mhgpo_is", "algo.train_modules=[rewriter,answerer]", "algo.penalty_scale={rewriter: 2.0}"],
    "an endpoint's module": ["algo=mappo", "+engine.endpoints={answerer: {model: gpt}}", "engine=transformers"],
    "random fillers": ["algo=mmgrpo", "algo.rollouts=6", "algo.group_size=3", "seed=3", TWO],
    "every call of a failed rollout": ["algo=mmgrpo", "algo.rollouts=4", "algo.padding_mode=ragged", "algo.loss_mean=token"],
    "Algorithm 3": ["algo=mhgpo_rr", "algo.regroup=alg3", "algo.group_size=2", "seed=9", TWO],
    "chunks of an agent": ["algo=mhgpo_rr", "algo.regroup=agent_chunks", "algo.group_size=2", "seed=9"],
    "random aggregation": ["algo=mhgpo_fof_os", "algo.aggregate=random", "algo.os_group=parent", "algo.group_size=2", "seed=9"],
    "refilled": ["algo=grpo", "algo.group_size=2", "algo.zero_variance=refill", TWO],
    "scaled": ["algo=mt_grpo", "algo.advantage_scale={reranker: 0.5}", "algo.std_over=batch", "algo.alpha=0.9"],
    "a constant length": ["algo=mt_grpo_variable", "algo.loss_mean=constant", TWO],
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_step_with_options_is_printed_as_it_was_trained(options, tmp_path, capsys):
    check_as_trained(tmp_path / "run", trained(tmp_path / "run", *options), capsys)
