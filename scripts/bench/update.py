"""The update against TRL: `python -m scripts.bench.update [shape=is,fof|all] [threads=1] [repeats=3] [model=1M]`.

All sides train on the same rollouts from the same random weights: TRL's GRPOTrainer through `rollout_func` (its best of
micro-batches of 4, 8 and 32 rows), a plain padded loop with `logits_to_keep` (likewise), and mmrl. One update is
everything between given rollouts and changed weights: packing or padding, forward, backward, clipping, AdamW. Before
anything is timed, log-probabilities must agree to 1e-4 and gradients to a cosine of 0.9999. Runs alternate (A B C A B C
...); the best of each counts. With one thread the clock is CPU time (see `rollout`).
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

from mmrl.config import AlgoConfig, ModelConfig, TrainConfig
from mmrl.trainer.objective import StepBatch, TrainCall
from mmrl.trainer.stream import Update
from mmrl.trainer.trl_trainer import MmrlTrainer, build_trainer
from scripts.bench.rollout import MODELS, make_model, timed
from scripts.bench.update_shapes import GROUP, SHAPES, Dice, Row, advantages, calls

TRL_BARS = {"is": 7.0, "fof_converged": 7.0, "long": 1.0}
PLAIN_BARS = {"is": 4.0, "long": 1.0}
TRL_BAR, PLAIN_BAR = 3.0, 1.5
MICRO = (4, 8, 32)
KINDS = ("trl", "plain")


def tokenizer(vocabulary: int) -> Any:
    """TRL wants one; nothing is tokenized."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{n}": n for n in range(vocabulary)}
    inner = Tokenizer(WordLevel(words, unk_token="w1"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1")


class Trl:
    """TRL's GRPOTrainer with rollouts handed in."""

    def __init__(self, size: str, rows: list[Row], micro: int, folder: Path):
        self.rows = rows
        self.steps = len(rows) // micro
        arguments = trl.GRPOConfig(
            output_dir=str(folder),
            learning_rate=0.0,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=self.steps,
            num_generations=GROUP,
            max_completion_length=4096,
            beta=0.0,
            loss_type="grpo",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
        )
        self.trainer = trl.GRPOTrainer(
            model=make_model(size),
            reward_funcs=lambda reward, **_: list(reward),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["-"] * len(rows)}),
            processing_class=tokenizer(MODELS[size][-1]),
            rollout_func=self.rollouts,
        )
        self.trainer.create_optimizer_and_scheduler(10**6)
        self.trainer.current_gradient_accumulation_steps = self.steps

    def rollouts(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """What TRL's rollout function returns."""
        return {
            "prompt_ids": [list(row.prompt) for row in self.rows],
            "completion_ids": [list(row.completion) for row in self.rows],
            "logprobs": [[0.0] * len(row.completion) for row in self.rows],
            "env_mask": [row.mask for row in self.rows],
            "reward": [row.reward for row in self.rows],
        }

    def gradients(self) -> dict[str, torch.Tensor]:
        """Forward and backward of all rows."""
        model = self.trainer.model
        model.train()
        model.zero_grad()
        for _ in range(self.steps):
            self.trainer.training_step(model, [{"prompt": "-"} for _ in self.rows], None)
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def run(self) -> None:
        """One update."""
        self.gradients()
        torch.nn.utils.clip_grad_norm_(self.trainer.model.parameters(), 1.0)
        self.trainer.optimizer.step()


class Plain:
    """A plain loop: micro-batches in the order of the rows, padded, logits at the completions alone."""

    def __init__(self, size: str, rows: list[Row], micro: int):
        self.rows, self.micro = rows, micro
        self.model: Any = make_model(size).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)

    def logprobs(self, rows: list[Row]) -> torch.Tensor:
        """(rows, C) of the completions, padded on the right."""
        before, after = max(len(row.prompt) for row in rows), max(len(row.completion) for row in rows)
        ids = torch.zeros(len(rows), before + after, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            start, stop = before - len(row.prompt), before + len(row.completion)
            ids[number, start:stop] = torch.tensor(row.prompt + row.completion)
            mask[number, start:stop] = 1
        logits = self.model(ids, attention_mask=mask, logits_to_keep=after + 1, use_cache=False).logits[:, :-1]
        chosen: torch.Tensor = logits.gather(-1, ids[:, before:, None])[..., 0] - logits.logsumexp(-1)
        return chosen

    def gradients(self) -> dict[str, torch.Tensor]:
        """Forward and backward of all rows."""
        self.model.zero_grad()
        weights = advantages(self.rows)
        for start in range(0, len(self.rows), self.micro):
            rows = self.rows[start : start + self.micro]
            found = self.logprobs(rows)
            loss = torch.zeros(())
            for row, advantage, logprobs in zip(rows, weights[start:], found, strict=False):
                mask = torch.tensor(row.mask)
                ratio = torch.exp(logprobs[: len(mask)] - logprobs[: len(mask)].detach())
                term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = loss - (term * mask).sum() / mask.sum() / len(self.rows)
            loss.backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def run(self) -> None:
        """One update."""
        self.gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class Ours:
    """mmrl's trainer, one optimizer step by hand."""

    def __init__(self, size: str, batch: list[TrainCall], folder: Path, packing: str, budget: int | None = None):
        self.batch = batch
        self.trainer: MmrlTrainer = build_trainer(
            make_model(size),
            tokenizer(MODELS[size][-1]),
            train=TrainConfig(lr=0.0, packing=packing, microbatch_tokens=budget),  # type: ignore[arg-type]
            algo=AlgoConfig(name="bench", beta=0.0),
            model_config=ModelConfig(name="bench", path="tiny"),
            seed=0,
            output_dir=folder,
            next_batch=lambda step: StepBatch(step=step, calls=batch),
            on_step_end=lambda step, metrics: None,
        )
        self.trainer.create_optimizer_and_scheduler(10**6)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Packing, forward and backward of all calls."""
        self.trainer.model.zero_grad()
        (packs,) = self.trainer._packs(StepBatch(step=1, calls=self.batch))
        self.trainer.training_step(self.trainer.model, {"update": Update(1, packs, first=True, last=True)})
        return {name: p.grad for name, p in self.trainer.model.named_parameters() if p.grad is not None}

    @property
    def tokens(self) -> int:
        """Tokens forwarded."""
        return int(self.trainer.totals.plain[0])

    def run(self) -> None:
        """One update."""
        self.gradients()
        torch.nn.utils.clip_grad_norm_(self.trainer.model.parameters(), 1.0)
        assert self.trainer.optimizer is not None
        self.trainer.optimizer.step()


def cosine(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Of two gradients, all parameters together."""
    one = torch.cat([left[name].double().flatten() for name in sorted(right)])
    two = torch.cat([right[name].double().flatten() for name in sorted(right)])
    return float(one @ two / one.norm() / two.norm())


def check(ours: Ours, plain: Plain, peer: Trl) -> dict[str, float]:
    """Largest difference of a log-probability, and cosines of the gradients.

    Raises:
        SystemExit: beyond the tolerances.
    """
    found = {call.id: values for call, values in zip(ours.batch, ours.trainer.policy_logprobs(ours.batch), strict=True)}
    worst = 0.0
    for number, row in enumerate(plain.rows):
        with torch.no_grad():
            expected = plain.logprobs([row])[0][torch.tensor(row.mask).bool()]
        mine = [value for turn in range(0, len(row.turns), 2) for value in found[f"{number}.{turn}"]]
        worst = max(worst, float((expected - torch.tensor(mine)).abs().max()))
    mine_gradient = ours.gradients()
    result = {
        "max_logprob_difference": worst,
        "cosine_plain": cosine(mine_gradient, plain.gradients()),
        "cosine_trl": cosine(mine_gradient, peer.gradients()),
    }
    if worst > 1e-4 or min(result["cosine_plain"], result["cosine_trl"]) < 0.9999:
        raise SystemExit(f"the sides do not compute the same: {result}")
    return result


def once(run: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, wall-clock seconds) of one run."""
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(name: str, size: str, threads: int, repeats: int, budget: int | None) -> dict[str, Any]:
    """One line of the table."""
    rows = SHAPES[name](Dice(MODELS[size][-1]))
    batch = calls(rows)
    folder = Path(tempfile.mkdtemp())
    ours, sorted_rows = (Ours(size, batch, folder / p, p, budget) for p in ("auto", "padded"))
    peers = {f"trl{micro}": Trl(size, rows, micro, folder / "trl") for micro in MICRO if micro <= len(rows)}
    plains = {f"plain{micro}": Plain(size, rows, micro) for micro in MICRO if micro <= len(rows)}
    agreement = check(ours, plains["plain4"], peers["trl4"])
    clock = 0 if threads == 1 else 1
    everyone: dict[str, Any] = {**peers, **plains}
    tuning = {key: once(side.run)[clock] for key, side in everyone.items()}
    best = {kind: min((key for key in everyone if key.startswith(kind)), key=tuning.__getitem__) for kind in KINDS}
    runs: dict[str, Callable[[], object]] = {
        "ours": ours.run,
        "trl": everyone[best["trl"]].run,
        "padded": sorted_rows.run,
        "plain": everyone[best["plain"]].run,
    }
    seconds = timed(runs, repeats)
    counted = {key: sorted(one[clock] for one in several) for key, several in seconds.items()}
    least = {key: several[0] for key, several in counted.items()}
    widths = max(len(row.prompt) for row in rows) + max(len(row.completion) for row in rows)
    least |= {kind: min(least[kind], tuning[best[kind]]) for kind in KINDS}
    return {
        "shape": name,
        "rows": len(rows),
        "padded_tokens": widths * len(rows),
        "real_tokens": sum(len(row.prompt) + len(row.completion) for row in rows),
        "unique_tokens": ours.tokens,
        "seconds": least,
        "median": {key: several[len(several) // 2] for key, several in counted.items()},
        "wall_clock": {key: min(wall for _, wall in several) for key, several in seconds.items()},
        "clock": ("cpu", "wall")[clock],
        "best_micro_batches": best,
        "ratio_trl": least["trl"] / least["ours"],
        "ratio_plain": least["plain"] / least["ours"],
        "ratio_padded": least["padded"] / least["ours"],
        **agreement,
    }


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a bar is missed."""
    options = dict(argument.split("=", 1) for argument in arguments)
    unknown = set(options) - {"shape", "threads", "repeats", "model", "budget", "out"}
    names = list(SHAPES) if options.get("shape", "all") == "all" else options["shape"].split(",")
    if unknown or set(names) - set(SHAPES):
        raise SystemExit(
            f"got {sorted(unknown) or names}: expected shape=all or some of {','.join(SHAPES)}, threads=, repeats=, "
            "model=, budget=, out="
        )
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    threads, size = int(options.get("threads", "1")), options.get("model", "1M")
    budget = int(options["budget"]) if "budget" in options else None
    torch.set_num_threads(threads)
    print(f"{size}, {threads} threads, load {os.getloadavg()}")
    print(
        f"{'shape':14}{'padded':>8}{'real':>8}{'unique':>8}{'TRL s':>8}{'plain s':>9}{'rows s':>8}{'ours s':>8}"
        f"{'TRL/ours':>10}{'plain/ours':>12}{'rows/ours':>11}"
    )
    lines = []
    for name in names:
        line = measure(name, size, threads, int(options.get("repeats", "3")), budget)
        lines.append(line)
        s = line["seconds"]
        print(
            f"{name:14}{line['padded_tokens']:8}{line['real_tokens']:8}{line['unique_tokens']:8}{s['trl']:8.2f}"
            f"{s['plain']:9.2f}{s['padded']:8.2f}{s['ours']:8.2f}{line['ratio_trl']:10.2f}{line['ratio_plain']:12.2f}"
            f"{line['ratio_padded']:11.2f}",
            flush=True,
        )
    missed = [
        f"{line['shape']} ({against})"
        for line in lines
        for against, bar in (
            ("trl", TRL_BARS.get(line["shape"], TRL_BAR)),
            ("plain", PLAIN_BARS.get(line["shape"], PLAIN_BAR)),
            ("padded", 1.0),
        )
        if line[f"ratio_{against}"] < bar
    ]
    result = {
        "bench": "update",
        "model": size,
        "threads": threads,
        "load": os.getloadavg(),
        "machine": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "missed": missed,
        "lines": lines,
    }
    path = Path(options.get("out", f"outputs/bench/update_{time.strftime('%Y%m%d_%H%M%S')}.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    print(f"load {os.getloadavg()}; {'bars missed: ' + ', '.join(missed) if missed else 'all bars reached'}; {path}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
