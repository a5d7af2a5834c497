"""How exported weights are used elsewhere: three lines for transformers, vLLM, DSPy and `openai`.

Printed by `mmrl export` and written into its model card; each is run in a test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mmrl.config.base import SHIPPED
from mmrl.models.load import ASSETS

ADDRESS = "http://127.0.0.1:8000/v1"
"""Where `mmrl serve` listens where nothing else is said."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
ASK = '[{"role": "user", "content": "Hello"}]'


def snippets(
    folder: Path, names: Sequence[str], base: str, rank: int | None, *, modules: Sequence[str], program: bool
) -> Iterator[tuple[str, str]]:
    """(library, code) for each.

    Args:
        folder: the export, or its name on the hub.
        names: folders below it, one for each set of weights; empty: it holds the weights itself.
        base: the base model of adapters.
        rank: of an adapter; None: full weights.
        modules: those that `mmrl serve` knows apart, where the folder says which one speaks with which weights.
        program: whether the folder has a `program.json`.
    """
    weights = f"{folder}/{names[0]}" if names else str(folder)
    yield (
        "transformers",
        (
            "from transformers import pipeline\n"
            f'chat = pipeline("text-generation", model="{weights}")\n'
            f'print(chat({ASK}, max_new_tokens=64, do_sample=False, return_full_text=False)[0]["generated_text"])'
        ),
    )
    yield "vLLM", _vllm(weights, base, rank)
    # Whole models of several modules are served one at a time.
    policy = weights if names and not modules else str(folder)
    served = f"policy/{modules[0]}" if modules else "policy"
    yield "DSPy", f"import dspy  # after: mmrl serve policy={policy}\n{_dspy(folder, served, bool(modules), program)}"
    yield (
        "openai",
        (
            f"from openai import OpenAI  # after: mmrl serve policy={policy}\n"
            f'client = OpenAI(base_url="{ADDRESS}", api_key="none")\n'
            f'print(client.chat.completions.create(model="{served}", messages={ASK}).choices[0].message.content)'
        ),
    )


def _dspy(folder: Path, served: str, apart: bool, program: bool) -> str:
    loaded = f'program = Program(); program.load("{folder}/program.json")  # Program: your dspy.Module'
    # DSPy's cache knows policies by name alone, and the next one served has the same name.
    where = f'api_base="{ADDRESS}", api_key="none", cache=False'
    if program and apart:
        each = "for name, predictor in program.named_predictors():"
        return f'{loaded}\n{each} predictor.lm = dspy.LM(f"openai/policy/{{name}}", {where})'
    example = loaded if program else 'print(dspy.Predict("question -> answer")(question="Hello").answer)'
    return f'dspy.configure(lm=dspy.LM("openai/{served}", {where}))\n{example}'


def _vllm(weights: str, base: str, rank: int | None) -> str:
    if rank is None:
        return (
            "from vllm import LLM, SamplingParams\n"
            f'model = LLM("{weights}")\n'
            f"print(model.chat({ASK}, SamplingParams(max_tokens=64))[0].outputs[0].text)"
        )
    source = str(ASSETS / base) if base in SHIPPED else base
    # vLLM takes some ranks alone
    most = next((known for known in RANKS if known >= rank), rank)
    return (
        "from vllm import LLM, SamplingParams; from vllm.lora.request import LoRARequest\n"
        f'model = LLM("{source}", tokenizer="{weights}", enable_lora=True, max_lora_rank={most})\n'
        f'lora = LoRARequest("{Path(weights).name}", 1, "{weights}")\n'
        f"print(model.chat({ASK}, SamplingParams(max_tokens=64), lora_request=lora)[0].outputs[0].text)"
    )
