"""The policy of a table (`tests.helpers.tabular`) as a causal language model, for the real engine and trainer.

A token is a word: a prompt is one word (its history), a reply another, and each reply ends the turn. The logits after
a token are its row of the model's only weight, so a gradient of the loss is one in the table's own parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.rollout.environment import Environment, SamplingSettings, make_environment
from tests.helpers.tabular import TABLES, History, Table, TableTask, word

NEVER = -1e4
"""Logit of a word that is no reply of a module: its probability is 0, and so is its gradient."""


class TabularConfig(PretrainedConfig):
    model_type = "mmrl_tabular"

    def __init__(self, vocab_size: int = 4, **others: Any):
        super().__init__(**{"tie_word_embeddings": False, **others})
        self.vocab_size = vocab_size
        # A critic's head is as wide as a hidden state; layers are asked for by the trainer's estimate of memory.
        self.hidden_size, self.num_hidden_layers = vocab_size, 1


class Words(torch.nn.Module):
    """The backbone, without weights: the hidden state of a token is 1 at its id, 0 elsewhere."""

    def __init__(self, words: int):
        super().__init__()
        self.words = words

    def forward(self, input_ids: torch.Tensor, **ignored: Any) -> BaseModelOutput:
        one_hot = torch.nn.functional.one_hot(input_ids, self.words)
        return BaseModelOutput(last_hidden_state=one_hot.float())  # type: ignore[arg-type]


class Rows(torch.nn.Module):
    """The output head: the logits after a token are its row."""

    mask: torch.Tensor

    def __init__(self, words: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(words, words))
        self.register_buffer("mask", torch.zeros(words, words))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = hidden.argmax(-1)
        return self.weight[ids] + self.mask[ids]


class TabularModel(PreTrainedModel, GenerationMixin):
    config_class = TabularConfig
    base_model_prefix = "backbone"

    def __init__(self, config: TabularConfig):
        super().__init__(config)
        self.backbone = Words(config.vocab_size)
        self.head = Rows(config.vocab_size)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.backbone

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        return_dict: bool = True,
        **ignored: Any,
    ) -> CausalLMOutputWithPast:
        logits = self.head(self.backbone(input_ids).last_hidden_state)
        cache = (past_key_values or DynamicCache()) if use_cache else None
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def vocabulary(table: Table) -> list[str]:
    most = max(table.replies.values())
    return ["<pad>", "<eos>", "<unk>", *(f"r{n}" for n in range(most)), *map(word, table.histories)]


def tabular_tokenizer(table: Table) -> PreTrainedTokenizerFast:
    words = {name: number for number, name in enumerate(vocabulary(table))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    return made


def tabular_model(table: Table, dtype: torch.dtype = torch.float32) -> Any:
    """The table's policy; the logits of its histories are the weight's entries at `places`."""
    words = vocabulary(table)
    replies = [words.index(f"r{n}") for n in range(max(table.replies.values()))]
    ends = {"eos_token_id": replies, "pad_token_id": 0}
    model: Any = TabularModel(TabularConfig(vocab_size=len(words), **ends))
    with torch.no_grad():
        for history in table.histories:
            row = words.index(word(history))
            model.head.mask[row] = NEVER
            for reply, logit in enumerate(table.logits(history)):
                model.head.mask[row, replies[reply]] = 0.0
                model.head.weight[row, replies[reply]] = logit
    # Every reply ends its turn.
    model.generation_config.eos_token_id = replies
    return model.to(dtype).eval()


def entries(table: Table, weight: torch.Tensor) -> dict[History, list[float]]:
    """The entries of a tensor of the weight's shape, its gradient say, as `Table.gradient` has them."""
    words = vocabulary(table)
    first = words.index("r0")
    return {
        history: weight[words.index(word(history)), first : first + len(table.logits(history))].tolist()
        for history in table.histories
    }


def tabular_environment(table: Table, seed: int = 0, step: int = 0, model: Any = None) -> Environment:
    """The real rollout of a table, played by the embedded engine."""
    tokenizer, model = tabular_tokenizer(table), tabular_model(table) if model is None else model
    engine = TransformersEngine(model, tokenizer, TransformersConfig(), EngineSetup(max_context=16))
    settings = SamplingSettings(
        temperature=table.temperature, top_p=1.0, top_k=0, parse_retries=0, max_tokens=1, max_context=16
    )
    return make_environment(TableTask(table), engine, tokenizer, settings, (seed, step))


def saved(name: str, folder: Path) -> list[str]:
    """Write a table's model and task into a folder; the words of a command that is run from there."""
    table = TABLES[name]
    tabular_model(table).save_pretrained(folder / "policy")
    tabular_tokenizer(table).save_pretrained(folder / "policy")
    conf = folder / "conf" / "task" / f"tabular_{name}.yaml"
    conf.parent.mkdir(parents=True, exist_ok=True)
    task = {"name": f"tabular_{name}", "max_tokens": 1, "max_context": 16}
    conf.write_text("# @package _global_\n" + yaml.safe_dump({"task": task}))
    model = ["model=hf", "model.path=policy", "model.lora=null", "model.gradient_checkpointing=false"]
    return [f"task=tabular_{name}", "plugins=[tests.helpers.tabular_plugin]", *model]
