"""Sides of the update's benchmarks: TRL's GRPOTrainer, a plain padded loop, mmrl; and a check that they agree.

All train on the same rollouts (`update_shapes.Row`). One update is everything between rollouts and changed weights:
packing or padding, forward, backward, clipping, AdamW.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from mmrl.config import AlgoConfig, LoraConfig, ModelConfig, TrainConfig
from mmrl.trainer.objective import StepBatch, TrainCall
from mmrl.trainer.settings import Settings
from mmrl.trainer.trl_trainer import MmrlTrainer, Update
from scripts.bench.common import cosine
from scripts.bench.update_shapes import GROUP, Row, advantages


def tokenizer(vocabulary: int) -> Any:
    """Make a tokenizer of one token per word; its end-of-turn token is beyond what the model can say."""
    inner = Tokenizer(WordLevel({f"w{n}": n for n in range(vocabulary + 1)}, unk_token="w1"))
    inner.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token=f"w{vocabulary}")


def trl_config(
    folder: Path, micro: int, rows: int, use_cpu: bool = True, bf16: bool = False, **settings: Any
) -> trl.GRPOConfig:
    """TRL's settings for steps of `rows` rows that compute what mmrl's do, without logging or checkpoints."""
    return trl.GRPOConfig(
        output_dir=str(folder),
        learning_rate=0.0,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=GROUP,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        use_cpu=use_cpu,
        bf16=bf16,
        **settings,
    )


def trainer_settings(train: TrainConfig, lora: LoraConfig | None = None) -> Settings:
    """Settings of mmrl's trainer for an objective without a KL term."""
    model = ModelConfig(name="bench", path="tiny", lora=lora)
    return Settings(train=train, algo=AlgoConfig(name="bench", beta=0.0), model=model, seed=0)


class Side(ABC):
    """One way to do an update: its gradients, then clipping and AdamW."""

    model: Any
    optimizer: Any

    def gradients(self) -> dict[str, torch.Tensor]:
        """Forward and backward of all rollouts."""
        self.model.zero_grad()
        self.backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    @abstractmethod
    def backward(self) -> None:
        """Add the gradients of all rollouts to the parameters."""

    def run(self) -> None:
        """Do an update."""
        self.gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class Trl(Side):
    """TRL's GRPOTrainer with rollouts handed in."""

    def __init__(self, model: Any, rows: list[Row], micro: int, folder: Path):
        self.rows = rows
        self.steps = len(rows) // micro
        bf16, on_cpu = model.dtype == torch.bfloat16, model.device.type == "cpu"
        arguments = trl_config(folder, micro, len(rows), max_completion_length=4096, use_cpu=on_cpu, bf16=bf16)
        self.trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda reward, **_: list(reward),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["-"] * len(rows)}),
            processing_class=tokenizer(model.config.vocab_size),
            rollout_func=self.rollouts,
        )
        self.trainer.create_optimizer_and_scheduler(10**6)
        self.trainer.current_gradient_accumulation_steps = self.steps
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer

    def rollouts(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return the rollouts as TRL expects them of `rollout_func`."""
        return {
            "prompt_ids": [list(row.prompt) for row in self.rows],
            "completion_ids": [list(row.completion) for row in self.rows],
            "logprobs": [[0.0] * len(row.completion) for row in self.rows],
            "env_mask": [row.mask for row in self.rows],
            "reward": [row.reward for row in self.rows],
        }

    def backward(self) -> None:
        """Run the micro-batches of an update."""
        self.model.train()
        for _ in range(self.steps):
            self.trainer.training_step(self.model, [{"prompt": "-"} for _ in self.rows], None)


class Plain(Side):
    """A plain loop: micro-batches in the order of the rows, padded, logits at the completions alone."""

    def __init__(self, model: Any, rows: list[Row], micro: int):
        self.rows, self.micro = rows, micro
        self.model = model.train()
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

    def backward(self) -> None:
        """Run the micro-batches of an update."""
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
            loss.backward()


class Ours(Side):
    """mmrl's trainer, one optimizer step by hand."""

    def __init__(
        self,
        model: Any,
        batch: list[TrainCall],
        folder: Path,
        packing: str = "auto",
        budget: int | None = None,
        lora: LoraConfig | None = None,
    ):
        self.batch = batch
        self.trainer = MmrlTrainer(
            model,
            tokenizer(model.config.vocab_size),
            trainer_settings(TrainConfig(lr=0.0, packing=packing, microbatch_tokens=budget), lora),  # type: ignore[arg-type]
            output_dir=folder,
        )
        self.trainer.create_optimizer_and_scheduler(10**6)
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer

    def backward(self) -> None:
        """Pack the calls and run the packs."""
        (packs,) = self.trainer.step_packs(StepBatch(step=1, calls=self.batch))
        self.trainer.training_step(self.model, {"update": Update(1, packs, first=True)})

    def logprobs(self) -> list[tuple[float, ...]]:
        """Log-probabilities of the calls' tokens under the policy."""
        return self.trainer.forwards.policy_logprobs([train.call for train in self.batch])

    @property
    def tokens(self) -> int:
        """Tokens forwarded."""
        return int(self.trainer.totals.counts[0])


def check(ours: Ours, plain: Plain, peer: Trl) -> dict[str, float]:
    """Largest difference of a log-probability, and cosines of the gradients.

    Raises:
        SystemExit: beyond the tolerances.
    """
    recorded = {train.call.id: values for train, values in zip(ours.batch, ours.logprobs(), strict=True)}
    worst = 0.0
    for number, row in enumerate(plain.rows):
        with torch.no_grad():
            expected = plain.logprobs([row])[0][torch.tensor(row.mask).bool()]
        values = [value for turn in range(0, len(row.turns), 2) for value in recorded[f"{number}.{turn}"]]
        worst = max(worst, float((expected - torch.tensor(values)).abs().max()))
    gradients = ours.gradients()
    result = {
        "max_logprob_difference": worst,
        "cosine_plain": cosine(gradients, plain.gradients()),
        "cosine_trl": cosine(gradients, peer.gradients()),
    }
    if worst > 1e-4 or not min(result["cosine_plain"], result["cosine_trl"]) >= 0.9999:
        raise SystemExit(f"the sides do not compute the same: {result}")
    return result
