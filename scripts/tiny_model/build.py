"""Build a tiny model that ships with mmrl: tokenizer, architecture, supervised warm start, facts about the build.

    python -m scripts.tiny_model.build                    # a killed build continues where it stopped
    python -m scripts.tiny_model.build model=tiny_dspy    # another of the models of `scripts/tiny_model/recipes.py`
    .venv-agents/bin/python -m scripts.tiny_model.build model=tiny_agent   # after make test-agents
    python -m scripts.tiny_model.build steps=300,1300,0,0 out=outputs/tiny_model

It learns from worlds with other seeds than the one that runs use: the same words in other names and facts, so it knows
the words of the runs' world and nothing else of it (but `tiny_direct`, which has to answer from memory). The warm start
ends early on purpose: every program gets a policy that knows the formats and leaves room for reinforcement learning.
Copying names comes first, then reading, then all formats, last a short phase on demonstrations of which 60 % are poor:
an undertrained start did not improve in 60 steps of reinforcement learning, and this one does. The initial standard
deviation is 0.06: half the steps of 0.02. Several models, since 0.7 M parameters that learn every program learn each
late; those that continue the first have stock phrases as single tokens, and recognise instructions but read none.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import yaml
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl.chat_template_utils import qwen3_instruct_2507_chat_template

from mmrl.config import TaskConfig, TrainConfig
from mmrl.config.engines import TransformersConfig
from mmrl.config.tasks import task_schema
from mmrl.engines import EngineSetup
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.models.load import ASSETS
from mmrl.records import Call
from mmrl.rollout import with_program
from mmrl.rollout.environment import SamplingSettings, make_environment
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.stages.sft import encode
from mmrl.tasks import TASKS as FACTORIES
from mmrl.tasks.agents.qa_direct import DirectQaTask
from mmrl.tasks.base import Demonstration, Task
from mmrl.tasks.dspy.base import DspyTask
from mmrl.tasks.mini import teach
from mmrl.tasks.search_program import MultihopQaTask
from scripts import expect_some_of, key_values
from scripts.tiny_model.card import build_facts, ship
from scripts.tiny_model.drills import drills
from scripts.tiny_model.facts import facts
from scripts.tiny_model.habits import habits
from scripts.tiny_model.mini.world import WORLD_SEED, make_world
from scripts.tiny_model.mini.write import write_world
from scripts.tiny_model.phrases import extend
from scripts.tiny_model.recipes import RECIPES, Phase, Recipe
from scripts.tiny_model.shots import varied
from scripts.tiny_model.tokenizer import load_or_train_tokenizer
from scripts.tiny_model.warm_start import WarmStart, warm_start

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> None:
    """Tokenizer, warm start, evaluation, shipped files."""
    args = key_values(arguments, OPTIONS)
    (name,) = expect_some_of("model", args["model"], RECIPES)
    recipe, seed = RECIPES[name], int(args["seed"])
    steps = [int(part) for part in args["steps"].split(",")] if args["steps"] else [p.steps for p in recipe.phases]
    if len(steps) != len(recipe.phases):
        phases = ", ".join(phase.name for phase in recipe.phases)
        raise SystemExit(f"steps: got {len(steps)} numbers, expected {len(recipe.phases)} ({phases})")
    torch.set_num_threads(int(args["threads"]))
    disable_progress_bar()
    work = Path(args["work"] or f"outputs/{name}_build")
    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if recipe.knows:
        worlds, demonstrations = [WORLD_SEED], knowledge(recipe.tasks)
    else:
        worlds = [WORLD_SEED + 1 + number for number in range(recipe.worlds)]
        demonstrations = [found for seed in worlds for found in demonstrations_of(recipe, seed)]
    say(f"{len(demonstrations)} demonstrations from {len(worlds)} worlds in {time.monotonic() - started:.0f} s")
    model, tokenizer = start(recipe, work, demonstrations, worlds, seed)
    tasks = build_tasks(recipe.tasks, WORLD_SEED)
    dev = [encode(tokenizer, d) for task in tasks for d in demonstrate(task, "dev", int(args["dev_items"]))]
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}")
    watcher = Watcher(tokenizer, tasks, dev, int(args["dev_items"]), float(args["minutes"]))
    modules = sorted({demonstration.module for demonstration in demonstrations})
    for phase, count in zip(recipe.phases, steps, strict=True):
        if not count:
            continue
        say(f"phase {phase.name}: {count} steps")
        train = TrainConfig(
            steps=count,
            lr=phase.lr,
            schedule=phase.schedule,  # type: ignore[arg-type]
            warmup_steps=min(30, count // 10),
            adam_beta2=0.99,
            save_every=500,
            microbatch_tokens=1024,
        )
        mix = {module: phase.mix.get(module, 0.0) for module in modules}
        shown = shown_in(phase, recipe.tasks, worlds) or demonstrations
        settings = WarmStart(train=train, batches=phase.batches, mix=mix, seed=seed)
        warm_start(model, tokenizer, shown, settings, work / phase.name, callbacks=[watcher])
    model.eval()
    checks = watcher.check(model, sum(steps), items=int(args["check_items"]) if args["check_items"] else None)
    out = Path(args["out"] or ASSETS / name)
    settings_of_build = {"model": name, "steps": sum(steps), "seed": seed, "threads": torch.get_num_threads()}
    minutes = round((time.monotonic() - started) / 60, 1)
    facts = build_facts(recipe, worlds, model, tokenizer, work, checks)
    ship(model, tokenizer, facts | settings_of_build | {"minutes_of_this_process": minutes}, out)
    say(f"wrote {out}")


OPTIONS = {
    "model": "tiny",
    "steps": "",
    "minutes": "60",
    "out": "",
    "work": "",
    "seed": "0",
    "threads": "1",
    "dev_items": "60",
    "check_items": "",
}
"""Options and their defaults: `steps` of each phase (the recipe's), training ends after `minutes` whatever they are,
`out` (where the model ships), `work` for tokenizer and checkpoints (delete it to start anew), `dev_items` of the dev
split in the checks while training and `check_items` in the last one (all)."""
HIDDEN, LAYERS = 96, 4
VOCABULARY = 2816
"""Largest vocabulary; a closed one of words is used up before."""


@contextmanager
def world(seed: int) -> Iterator[None]:
    """Tasks built inside read their examples in the mini world of `seed`."""
    with TemporaryDirectory() as folder:
        write_world(Path(folder), seed)
        with patch("mmrl.tasks.mini.examples.FOLDER", Path(folder)):
            yield


def build_tasks(names: Sequence[str], seed: int) -> list[Task]:
    """The tasks in the world of `seed`, configured as runs have them by default."""
    builders = [builder(name) for name in names]
    with world(seed):
        return [with_program(build()) for build in builders]


def builder(name: str) -> Callable[[], Task]:
    """Return what builds a task; `agent` is that of `scripts/tiny_model/traces.py`, which needs its SDK."""
    if name != "agent":
        return lambda: FACTORIES[name](task_config(name), 0)
    from scripts.tiny_model.traces import agent_task

    return agent_task


def task_config(name: str) -> TaskConfig:
    """The `task` section of `conf/task/<name>.yaml`, with the limits of the tiny model."""
    section: dict[str, object] = {}
    for path in (ROOT / "conf" / "task" / f"{name}.yaml", ROOT / "conf" / "limits" / "tiny" / f"{name}.yaml"):
        if path.is_file():
            section |= yaml.safe_load(path.read_text(encoding="utf-8"))["task"]
    return task_schema(name).model_validate(section)


def demonstrate(task: Task, split: str, items: int | None = None) -> list[Demonstration]:
    """All demonstrations of a split's first `items`."""
    return [found for example in task.examples(split)[:items] for found in teach.demonstrations(task, example)]


def demonstrations_of(recipe: Recipe, seed: int) -> list[Demonstration]:
    """Demonstrations and reading drills in the world of `seed`, of every split: none of them is used elsewhere."""
    found = []
    for task in build_tasks((*recipe.tasks, *recipe.drill_tasks), seed):
        for split in ("train", "dev", "test"):
            found += demonstrate(task, split) if task.name in recipe.tasks else []
            if isinstance(task, MultihopQaTask):
                found += drills(task, split, seed)
    return found


def shown_in(phase: Phase, names: Sequence[str], worlds: Sequence[int]) -> list[Demonstration]:
    """Demonstrations of a phase with habits or other prompts, from the train split of each world; else none."""
    tasks = [(task, seed) for seed in worlds for task in build_tasks(names, seed)]
    if phase.prompts:
        found = [varied(task, "train", seed, phase.habits) for task, seed in tasks if isinstance(task, DspyTask)]
    else:
        found = [habits(task, "train", seed) for task, seed in tasks if phase.habits]
    return [demonstration for several in found for demonstration in several]


def knowledge(names: Sequence[str]) -> list[Demonstration]:
    """Facts of the world of runs, and demonstrations of its train split."""
    found = []
    for task in build_tasks(names, WORLD_SEED):
        assert isinstance(task, DirectQaTask)
        found += [*facts(task, WORLD_SEED), *demonstrate(task, "train")]
    return found


def start(
    recipe: Recipe, work: Path, demonstrations: Sequence[Demonstration], worlds: Sequence[int], seed: int
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Model and tokenizer before the first phase: fresh ones, or a shipped model with stock phrases as tokens."""
    if recipe.init is None:
        tokenizer = load_or_train_tokenizer(work / "tokenizer", demonstrations, worlds, VOCABULARY)
        return new_model(tokenizer, seed), tokenizer
    folder = work / "start"
    if not (folder / "tokenizer.json").exists():  # written last
        tokenizer = PreTrainedTokenizerFast.from_pretrained(ASSETS / recipe.init)
        if recipe.calls_tools:
            tokenizer.chat_template = qwen3_instruct_2507_chat_template
        model = Qwen3ForCausalLM.from_pretrained(ASSETS / recipe.init)
        names = {word for seed in worlds for document in make_world(seed).documents for word in document.title.split()}
        first = demonstrations[: len(demonstrations) // len(worlds)]  # one world has them all
        phrases = extend(tokenizer, model, first, names if recipe.pieces else None, seed)
        say(f"{len(phrases)} stock phrases became tokens")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of tiny size with fresh weights: GPU-free, and of a family that every engine serves."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN * 8 // 3,
            num_hidden_layers=LAYERS,
            num_attention_heads=HIDDEN // 32,
            num_key_value_heads=HIDDEN // 32,
            head_dim=32,
            max_position_embeddings=4096,
            initializer_range=0.06,  # learns to copy names in half the steps of 0.02 (measured)
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Watcher(TrainerCallback):
    """Checks on dev at each checkpoint, prints, and stops when the time is up."""

    def __init__(self, tokenizer: Any, tasks: Sequence[Task], dev: Sequence[Call], items: int, minutes: float):
        self.tokenizer, self.tasks, self.dev, self.items, self.minutes = tokenizer, tasks, dev, items, minutes
        self.started = time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint has been written."""
        self.check(kwargs["model"], state.global_step, self.items)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop and save when the time is up."""
        if time.monotonic() - self.started > 60 * self.minutes:
            control.should_training_stop = control.should_save = True

    def check(self, model: Any, step: int, items: int | None) -> dict[str, float]:
        """Exact greedy completions per module on dev, and the whole programs on `items` dev questions."""
        training = model.training
        model.eval()
        found = {f"{module}_exact": value for module, value in exact_shares(model, self.dev).items()}
        for task in self.tasks:
            found |= {f"{task.name}_{name}": v for name, v in play(model, self.tokenizer, task, items).items()}
        model.train(training)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
        say(f"step {step}  {(time.monotonic() - self.started) / 60:.1f} min  {shown}")
        return found


@torch.no_grad()
def exact_shares(model: Any, encoded: Sequence[Call]) -> dict[str, float]:
    """Module -> share of completions that greedy decoding would give exactly (every token is the argmax)."""
    hits: dict[str, list[float]] = defaultdict(list)
    for item in encoded:
        ids = torch.tensor([item.prompt_ids + item.completion_ids])
        count = len(item.completion_ids)
        guessed = model(input_ids=ids, logits_to_keep=count + 1).logits[0, :-1].argmax(-1)
        hits[item.module].append(float(torch.equal(guessed, ids[0, -count:])))
    return {module: fmean(values) for module, values in hits.items()}


def play(model: Any, tokenizer: Any, task: Task, items: int | None) -> dict[str, float]:
    """Metrics of the whole program, greedy, on the first dev questions, and each module's penalised share."""
    engine = TransformersEngine(model, tokenizer, TransformersConfig(), EngineSetup())
    settings = SamplingSettings(temperature=0.0, top_p=1.0, top_k=0, parse_retries=0, max_tokens=100)
    env = make_environment(task, engine, tokenizer, settings, (0, "build"))
    plans = [(example, independent(1)) for example in task.examples("dev")[:items]]
    forest = asyncio.run(sample(env, plans, task.reward_sets[0]))
    found = {"reward": fmean(rollout.reward or 0.0 for rollout in forest.rollouts)}
    for name in forest.rollouts[0].metrics:
        found[name] = fmean(rollout.metrics.get(name, 0.0) for rollout in forest.rollouts)
    for module in forest.modules:
        calls = [call for call in forest.calls.values() if call.module == module]
        found[f"{module}_penalised"] = fmean(call.penalty < 0 for call in calls) if calls else 0.0
    return found


def say(text: str) -> None:
    """Print progress at once, also into a pipe."""
    print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
