"""Each way that a run takes through a model, against the plain forward of one row: log-probabilities and gradients.

The plain side is transformers alone: eager attention, evaluation mode, one row, no cache, no mask.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mmrl.config import AlgoConfig, LoraConfig, ModelConfig, TrainConfig
from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup, Request, Sampling
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.errors import EngineFailure, MmrlError
from mmrl.models.adapter import check_new_adapter
from mmrl.models.load import NO_CODE, load_model, load_tokenizer, skeleton
from mmrl.models.selfcheck import CheckRow
from mmrl.trainer.objective import TrainCall
from mmrl.trainer.settings import Settings
from mmrl.trainer.trl_trainer import MmrlTrainer
from scripts.bench.rollout import run_engine
from scripts.models.architectures import ENDS, tiny_model

TOLERANCE = 1e-4
"""Difference of a log-probability in float32 that rounding explains."""
GRADIENT_TOLERANCE = 1e-3
"""Relative difference of a gradient, which sums over all tokens."""
PROMPTS, COMPLETIONS = (2, 5, 11, 19, 30, 44), (1, 7, 4, 12, 9, 6)
"""Tokens of the rows; each ends at another step."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and completion."""


@dataclass(frozen=True)
class Case:
    """A model's folder and rows to compare it on."""

    folder: Path
    rows: list[Row]
    selfcheck: bool = True
    """The run's own check, which refuses what is wrong or takes another way."""

    @property
    def config(self) -> ModelConfig:
        """The `model` section that names the folder."""
        return ModelConfig(name="tiny", path=str(self.folder), dtype="float32", selfcheck=self.selfcheck)

    def plain(self) -> Any:
        """Return the model as transformers loads it."""
        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager", **NO_CODE
        ).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a ChatML template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special[2], pad_token=special[0])
    made.chat_template = CHATML
    return made


def rows(seed: int = 0) -> list[Row]:
    """Return rows of random tokens."""
    draw = random.Random(seed)
    sizes = zip(PROMPTS, COMPLETIONS, strict=True)
    tokens = iter(lambda: draw.randrange(len(ENDS), 250), None)
    return [
        (tuple(itertools.islice(tokens, prompt)), tuple(itertools.islice(tokens, reply))) for prompt, reply in sizes
    ]


def logprobs(model: Any, row: Row) -> torch.Tensor:
    """Return the log-probabilities of a completion, (T,), by the model's own forward of this row alone."""
    prompt, completion = row
    ids = torch.tensor([prompt + completion])
    # A mask of ones: without any, a few families (Moshi) let tokens see what follows them.
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    logits: torch.Tensor = output.logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def worst(found: Sequence[Any], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference; NaN where a number is none."""
    return float(torch.cat([(torch.as_tensor(f) - e).abs() for f, e in zip(found, expected, strict=True)]).max())


def measure(architecture: str, *, selfcheck: bool = True) -> dict[str, float | str]:
    """Return, by way, the largest difference to the plain forward, or why there is none."""
    with tempfile.TemporaryDirectory() as name:
        case = Case(Path(name), rows(), selfcheck)
        try:
            tiny_model(architecture).save_pretrained(case.folder)
            tokenizer().save_pretrained(case.folder)
            plain = case.plain()
        except Exception as error:
            return {"plain": _told(error)}
        found: dict[str, float | str] = {}
        ways: dict[str, Callable[[Case, Any], dict[str, Any]]] = {
            "plain": causal,
            "load": load,
            "engine": engine,
            "update": update,
            "adapter": adapter,
        }
        for way, compare in ways.items():
            try:
                found |= compare(case, plain)
            except Exception as error:
                found[way] = _told(error)
                if way == "load":
                    break
        return found


def load(case: Case, plain: Any) -> dict[str, float]:
    """Look at the model as a command does before it makes a run directory."""
    skeleton(case.config)
    return {}


@torch.no_grad()
def causal(case: Case, plain: Any) -> dict[str, float]:
    """Compare the plain forward of a row with that of its beginning."""
    prompt, completion = case.rows[-1]
    whole = logprobs(plain, (prompt[:20], prompt[20:] + completion))[: len(prompt) - 20]
    return {"plain": worst([logprobs(plain, (prompt[:20], prompt[20:]))], [whole])}


def engine(case: Case, plain: Any) -> dict[str, float | str]:
    """Sample two batches; prompts of the second begin with the first."""
    setup = EngineSetup(threads=1, weights=case.config)
    served = TransformersEngine(
        load_model(case.config, "cpu"), load_tokenizer(case.config), TransformersConfig(), setup
    )
    first, first_gap = sampled(served, plain, [(prompt, len(reply)) for prompt, reply in case.rows])
    longer = [(prompt + reply + (7, 8, 9), 4 + 2 * number) for number, (prompt, reply) in enumerate(first)]
    return {
        "engine": first_gap,
        "engine again": sampled(served, plain, longer)[1],
        "loop": served.ways[0].name if served.ways else "",
    }


def sampled(
    served: TransformersEngine, plain: Any, asked: Sequence[tuple[tuple[int, ...], int]]
) -> tuple[list[Row], float]:
    """Sample after prompts, so many tokens each; return the rows, and the recorded log-probabilities' difference."""
    requests = [
        Request(prompt_ids=prompt, sampling=Sampling(max_tokens=tokens, seed=number), order=(number,))
        for number, (prompt, tokens) in enumerate(asked)
    ]
    made = run_engine(served, requests)
    found = [(request.prompt_ids, completion.ids) for request, completion in zip(requests, made, strict=True)]
    with torch.no_grad():
        expected = [logprobs(plain, row) for row in found]
    return found, worst([completion.logprobs for completion in made], expected)


def trainer(case: Case, lora: LoraConfig | None = None) -> MmrlTrainer:
    """Return the trainer of a run."""
    config = case.config.model_copy(update={"lora": lora})
    settings = Settings(train=TrainConfig(steps=1), algo=AlgoConfig(name="test", beta=0.0), model=config, seed=0)
    return MmrlTrainer(
        load_model(config, "cpu"),
        load_tokenizer(config),
        settings,
        output_dir=case.folder / "run",
    )


def calls(case: Case) -> list[TrainCall]:
    """Return the rows as calls."""
    return [TrainCall(call=CheckRow(*row).call(number)) for number, row in enumerate(case.rows)]


def scored(made: MmrlTrainer, case: Case, *, tries: bool) -> list[torch.Tensor]:
    """Return log-probabilities of each row by packs, in the mode that the model is in."""
    found: dict[str, torch.Tensor] = {}
    for pack in made.forwards.make_packs(calls(case), [""], score_all=True, tries=tries):
        numbers = made.forwards.score(made.model, pack).logprobs
        parts = numbers.split([len(train.call.completion_ids) for train in pack.calls])
        found |= {train.call.id: part for train, part in zip(pack.calls, parts, strict=True)}
    return [found[str(number)] for number in range(len(case.rows))]


def update(case: Case, plain: Any) -> dict[str, float]:
    """Compare padded rows, in evaluation and training mode, tries where the model takes them, and the gradient."""
    made = trainer(case)
    with torch.no_grad():
        expected = [logprobs(plain, row) for row in case.rows]
        made.model.eval()
        found = {"padded": worst(scored(made, case, tries=False), expected)}
        if made.forwards.tries:
            found["tries"] = worst(scored(made, case, tries=True), expected)
    made.model.train()
    numbers = scored(made, case, tries=False)
    found["training"] = worst([part.detach() for part in numbers], expected)
    _objective(numbers).backward()
    plain.zero_grad()
    _objective([logprobs(plain, row) for row in case.rows]).backward()
    found["gradient"] = _relative(made.model, plain)
    return found


def adapter(case: Case, plain: Any) -> dict[str, float]:
    """Compare rows through an adapter on all linear layers with the plain forward of merged weights."""
    lora = LoraConfig(r=4, alpha=8, targets=("all-linear",))
    check_new_adapter(skeleton(case.config)[0], lora)
    made = trainer(case, lora)
    policy = made.model
    assert isinstance(policy, PeftModel)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.03 * torch.randn(parameter.shape, generator=draw))
    merged = PeftModel(case.plain(), policy.peft_config["default"])
    set_peft_model_state_dict(merged, get_peft_model_state_dict(policy))
    alone = merged.merge_and_unload().eval()
    with torch.no_grad():
        expected = [logprobs(alone, row) for row in case.rows]
        policy.eval()
        found = {"adapter": worst(scored(made, case, tries=False), expected)}
        changed = worst(expected, [logprobs(plain, row) for row in case.rows])
    if not changed > 100 * TOLERANCE:
        raise AssertionError(f"the adapter changes log-probabilities by no more than {changed:.1g}")
    return found


def _objective(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a sum in which every token has another weight."""
    # With equal weights, tokens that are swapped would cancel out.
    return torch.stack([(torch.linspace(1, 2, len(part)) * part).sum() for part in numbers]).sum()


def _relative(model: Any, plain: Any) -> float:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:3]
    zero = torch.zeros(())
    pairs = [(zero if found[n] is None else found[n], zero if g is None else g) for n, g in expected.items()]
    share = sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
    return math.sqrt(share)


def _told(error: Exception) -> str:
    """Return the words of a refusal, or where an error that is none came from."""
    words = " ".join(str(error).split())
    if isinstance(error, MmrlError) and not isinstance(error, EngineFailure):
        return f"refused: {words}"
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}"
    return f"traceback: {type(error).__name__}: {words[:200]} @ {where}"


def quiet() -> None:
    """Silence what libraries say of each tiny model."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("mmrl", "trl", "peft"):
        logging.getLogger(name).setLevel(logging.ERROR)
