"""Weights and tokenizer from a `model.*` section, or of a policy.

Used by engines, trainer, stages and run, so that all of them load the same weights in the same way. Nothing here
imports torch or transformers until it is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from packaging.version import Version

from mmrl.config import ModelConfig
from mmrl.config.base import SHIPPED, iter_leaves
from mmrl.errors import CheckpointError, ConfigError, located, nearest, reason_of, refuse
from mmrl.models.adapter import with_adapters
from mmrl.models.headers import saved_weights
from mmrl.models.hub import hub_answers
from mmrl.models.prepare import (
    choose_attention,
    computed_back,
    keep_still,
    make_savable,
    quantised_by,
    refuse_config,
    switch_noise_off,
)
from mmrl.models.report import judge, quantised, quiet, saved_inside, without_wrapper
from mmrl.store.policy import Policy, from_index, gone_problems
from mmrl.system.files import user_path

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ASSETS = Path(__file__).parents[1] / "assets"
TINY = ASSETS / "tiny"
"""The first of the models shipped with the package (`mmrl.config.schema`)."""


class ServedWeights(TypedDict):
    """An embedded engine's arguments for weights per module."""

    adapters: Mapping[str, str] | None
    """Module -> name of its weights; None: all share one policy."""
    initial: PreTrainedModel | None
    """Full weights of frozen modules that act with the initial ones."""


def local_path(path: str) -> str:
    """Return the folder of a shipped model, else a folder or hub id as typed."""
    return str(ASSETS / path if path in SHIPPED else user_path(path))


PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of models that read images, sounds or videos too, beside those that such a model is loaded from here."""
NO_CODE = {"trust_remote_code": False}
"""Left out, transformers would ask at the terminal whether to run the code of a model, and wait for the answer."""


MISTRAL_FORMAT_SINCE = "5.15"
"""Version of transformers, from which on a tokenizer is loaded with `mistral_format`."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `model`, with the chat template, thinking mode and date that the config asks for.

    Raises:
        ConfigError: `model.path` cannot be loaded, or its chat template cannot be used.
    """
    from transformers import PreTrainedTokenizerFast

    from mmrl.models.tokenizer import prepare, say, spells_otherwise

    tokenizer = _saved_tokenizer(model)
    with _refusing(model, "tokenizer"):
        otherwise = spells_otherwise(tokenizer, _finder(model, "tokenizer")("tokenizer.json"))
    if otherwise:
        say(model.path, f"{type(tokenizer).__name__} would cut texts otherwise than tokenizer.json, which is taken")
        tokenizer = _loaded(model, "tokenizer", PreTrainedTokenizerFast)
    prepare(tokenizer, model)
    return tokenizer


def vocabulary(model: ModelConfig) -> dict[str, int]:
    """Return token -> id of the tokenizer of `model`, which need not be able to write a prompt.

    Raises:
        ConfigError: `model.path` cannot be loaded.
    """
    return _saved_tokenizer(model).get_vocab()


def _saved_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the files of `model`, as transformers chooses its class.

    Raises:
        ConfigError: `model.path` cannot be loaded.
    """
    from transformers import AutoTokenizer

    # Where mistral_common is installed it would take that one's for Mistral's models, which has no chat template.
    known = Version(version("transformers")) >= Version(MISTRAL_FORMAT_SINCE)
    return cast(
        "PreTrainedTokenizerBase",
        _loaded(model, "tokenizer", AutoTokenizer, **({"mistral_format": False} if known else {})),
    )


def load_model(model: ModelConfig, device: str | torch.device) -> PreTrainedModel:
    """Return the causal language model of `model` on `device`, in training shape: without noise in its forwards.

    Raises:
        ConfigError: `model.path` cannot be loaded, or its files hold other weights than its config asks for.
    """
    import torch

    # The config first: the model's loader queries the hub for an adapter even with local_files_only.
    config, kind, attention = _prepared(model)
    dtype, plain = _dtype(model, torch.device(device)), computed_back(config)
    options = {"config": config, "dtype": dtype, "attn_implementation": attention, **plain}
    with quiet():
        result: Any = _loaded(model, "model", kind, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    loaded: PreTrainedModel = result[0]
    if problem := judge(result[1], loaded)[0]:
        raise ConfigError(f"model.path: {_cannot(model, 'weights')}: {problem}")
    keep_still(loaded)
    make_savable(loaded.generation_config)
    if plain:  # by their own conversion, which knows of no other type
        loaded.to(dtype)  # type: ignore[arg-type]  # see below
    loaded.to(torch.device(device))  # type: ignore[arg-type]  # transformers wraps `to` without its signature
    if model.matmul == "onednn":
        from mmrl.models.linear import use_onednn

        use_onednn(loaded)
    return loaded


def saved_state(model: PreTrainedModel, folder: Path) -> Mapping[str, torch.Tensor]:
    """Return the full weights in a checkpoint of `model`, on the CPU, by the names and in the shapes that it has.

    Files have the published names and shapes, as of single experts, which only transformers' own loading turns into
    those of its model.

    Raises:
        CheckpointError: they are not the weights of this model, all of them and no others.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # At least float32, which trained weights are whatever `model.dtype` says.
    dtype = torch.promote_types(model.dtype, torch.float32)
    options = {"config": model.config, "dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    kind: Any = AutoModelForCausalLM
    try:
        with quiet():
            loaded, report = kind.from_pretrained(folder, **options, **NO_CODE)
    except Exception as error:  # of transformers, torch and safetensors
        raise CheckpointError(f"{folder}: its weights cannot be loaded: {reason_of(error)}") from error
    state: Mapping[str, torch.Tensor] = loaded.state_dict()
    if problem := "; ".join(filter(None, judge(report, loaded))):
        raise CheckpointError(f"{folder}: these are not the weights of this run's model: {problem}")
    return state


def skeleton(model: ModelConfig) -> tuple[PreTrainedModel, str]:
    """Return the causal language model of `model` without a number in it, and what is left out of its files, in words.

    On the meta device, by transformers' own loading of what the headers of its files say: what `load_model` would
    refuse is refused here, before anything is loaded.

    Raises:
        ConfigError: as `load_model`.
    """
    import torch

    config, kind, attention = _prepared(model)
    plain = computed_back(config)
    with _refusing(model, "weights"), located(f"model.path: {_cannot(model, 'weights')}: "):
        weights = saved_weights(_finder(model), getattr(config, "transformers_weights", None))

    def load(names: Mapping[str, str]) -> tuple[PreTrainedModel, tuple[str, str]]:
        with quiet(), _refusing(model, "weights"), torch.device("meta"):
            loaded, report = kind.from_pretrained(
                None,
                config=config,
                state_dict={names[name]: weight for name, weight in weights.items()},
                dtype=torch.float32,
                attn_implementation=attention,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **plain,
                **NO_CODE,
            )
        return loaded, judge(report, loaded)

    loaded, (problem, note) = load({name: name for name in weights})
    if problem:
        parts, unwrapped = without_wrapper(weights)
        if parts and not load(unwrapped)[1][0]:
            problem = saved_inside(parts)
    problem = problem or quantised(weights, loaded, scaled=bool(plain))
    if problem:
        raise ConfigError(f"model.path: {_cannot(model, 'weights')}: {problem}")
    return loaded, f"model.path: {note} ('{model.path}')" if note else ""


def load_policy(
    policy: Policy, model: ModelConfig, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ServedWeights]:
    """Load a policy's model (with adapters) and tokenizer; also the engine's arguments for weights per module.

    Raises:
        ConfigError: the base cannot be loaded, or an adapter does not fit it.
    """
    loaded, serving = load_weights(policy, model, device)
    return loaded, load_tokenizer(tokenizer_section(policy, model)), serving


def weights_section(policy: Policy, model: ModelConfig) -> ModelConfig:
    """Return `model` for the weights of a policy: dtype and attention stay those of the config."""
    return model.model_copy(update={"path": policy.base, "revision": model.revision or policy.revision})


def tokenizer_section(policy: Policy, model: ModelConfig) -> ModelConfig:
    """Return `model` for the tokenizer of a policy; a chat template and a thinking mode of the config hold for it."""
    own = {"path": policy.tokenizer, "revision": None}
    return model.model_copy(update=own) if policy.tokenizer is not None else weights_section(policy, model)


def load_weights(policy: Policy, model: ModelConfig, device: str) -> tuple[PreTrainedModel, ServedWeights]:
    """Load a policy's model as `load_policy` does, without a tokenizer: for one that reads tokens and writes no prompt.

    Raises:
        ConfigError: as `load_policy`.
    """
    loaded = load_model(weights_section(policy, model), device)
    if policy.folders:
        loaded = cast("PreTrainedModel", with_adapters(loaded, policy.folders))
    initial = None
    if policy.initial is not None:
        initial = load_model(model.model_copy(update={"path": policy.initial}), device)
    return loaded, {"adapters": policy.modules, "initial": initial}


def load_configs(model: ModelConfig) -> tuple[PreTrainedConfig, GenerationConfig | None]:
    """Return the config and, where there is one, the generation config of `model`, without its weights.

    Raises:
        ConfigError: `model.path` cannot be loaded.
    """
    from transformers import AutoConfig, GenerationConfig

    config = _loaded(model, "config", AutoConfig)
    source, revision = local_path(model.path), model.revision or "main"
    with _refusing(model, "generation config"):
        try:
            generation = GenerationConfig.from_pretrained(source, revision=revision, local_files_only=_offline(source))
        except OSError:
            # Not every model has one: sampling then follows the config of the run alone.
            return config, None
    make_savable(generation)
    return config, generation


# A list, not a guess from the config: a model whose layers mix tokens in any other way (a window, a convolution, a
# state) would compute and train on wrong hidden states without an error.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Built like Llama: rotary positions, softmax attention over the whole context, logits that are the head's alone."""
HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", "OlmoHybridForCausalLM")
"""Layers of such attention, or of experts behind it, beside gated delta nets, whose state is a function of the tokens
before: what is shared is the state at the end of a prefix."""
HYBRIDS_SINCE = "5.15"
"""Version of transformers, from which on their layers call functions of their file and hold their states alike."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE kinds whose angles depend on the position alone."""


def rope_border(config: PreTrainedConfig) -> int | None:
    """Return the longest row whose positions are encoded as those of short rows; None where length changes nothing.

    With `longrope` (Phi 3 and 4), transformers encodes all rows of a forward by the longest one of them.
    """
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]  # one for each layer type
    borders = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(borders, default=None)


def causal_lm(model: torch.nn.Module) -> PreTrainedModel:
    """Return the causal LM inside a peft wrapper."""
    # By the method, so that this module needs no peft.
    return cast("PreTrainedModel", getattr(model, "get_base_model", lambda: model)())


def unknown_layers(causal: PreTrainedModel, more: tuple[str, ...] = ()) -> str | None:
    """Return the reason why a causal LM's layers are not those of `FAMILIES`, or of `more`; None where they are."""
    name, config = type(causal).__name__, causal.config
    if name not in FAMILIES + more:
        return f"{name} is not one of {', '.join(FAMILIES + more)}"
    if name in HYBRIDS and Version(version("transformers")) < Version(HYBRIDS_SINCE):
        return f"its recurrent layers need transformers {HYBRIDS_SINCE}, {version('transformers')} is installed"
    if config._attn_implementation == "eager" or config._attn_implementation.startswith("flash"):
        return f"its attention is '{config._attn_implementation}'"
    layer_types = getattr(config, "layer_types", None)
    if not {*(layer_types or ())} <= {"full_attention", "linear_attention"}:
        return "some of its layers do not attend to the whole context"
    if layer_types is None and getattr(config, "sliding_window", None) is not None:
        return "its attention is limited to a sliding window"
    rope = (config.rope_parameters or {}).get("rope_type")
    return None if rope in STATIC_ROPE else f"its position encoding '{rope}' depends on the length"


def built(model: ModelConfig) -> PreTrainedModel:
    """Return the causal language model that the config of `model` builds, on the meta device, whatever its weights are.

    Raises:
        ConfigError: as `load_model` by its config alone.
    """
    import torch

    config, kind, _ = _prepared(model)
    with quiet(), torch.device("meta"):
        return cast("PreTrainedModel", kind(config))


def _prepared(model: ModelConfig) -> tuple[PreTrainedConfig, Any, str]:
    """Return the config that a model is built from, its class, and its attention.

    Raises:
        ConfigError: no causal language model, or one that cannot be trained; an attention that it does not have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _refuse_adapter(model)
    config: PreTrainedConfig = _loaded(model, "config", AutoConfig)
    refuse_config(config, model.path)
    _refuse_ends(model, config)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    # As the loader of all classes does it, for a model of several kinds of input of which this is the text's part.
    if kind.config_class is config.sub_configs.get("text_config"):
        whole, config = config, config.get_text_config()
        if quantised_by(whole):
            config.quantization_config = whole.quantization_config
    switch_noise_off(config)
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        # For a loss of the routers that is never computed here; such a forward takes neither packed rows nor a cache.
        text.output_router_logits = False
    return config, kind, choose_attention(config, kind, model)


def _refuse_adapter(model: ModelConfig) -> None:
    """Refuse an adapter beside weights: transformers would put it on top of them, or load its base in their place."""
    find = _finder(model)
    with _refusing(model, "config"):
        if find("adapter_config.json") is None:
            return
        fault = "holds an adapter beside full weights" if find("config.json") else "is an adapter alone"
    raise ConfigError(f"model.path: '{model.path}' {fault}, expected full weights without one")


def _refuse_ends(model: ModelConfig, config: PreTrainedConfig) -> None:
    """Refuse ends of a turn that are no token ids, and a file of them that transformers would pass over, damaged."""
    values = [("config.json", getattr(config, "eos_token_id", None))]
    file = _finder(model)("generation_config.json")
    if file is not None:
        try:
            generation = json.loads(Path(file).read_text(encoding="utf-8"))
            values.append(("generation_config.json", generation.get("eos_token_id")))
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"model.path: {file} cannot be read: {reason_of(error)}") from None
    for name, value in values:
        if not all(type(one) is int for one in (value if isinstance(value, list) else [value]) if one is not None):
            raise ConfigError(
                f"model.path: eos_token_id of '{model.path}/{name}' is {value!r}, expected token ids, whole numbers"
            )


def _loaded(model: ModelConfig, part: str, kind: Any, **options: object) -> Any:
    """Load `model` by a class of transformers.

    Raises:
        ConfigError: `model.path` cannot be loaded.
    """
    source = _source(model, part)
    with _refusing(model, part):
        return kind.from_pretrained(
            source, revision=model.revision, local_files_only=_offline(source), **NO_CODE, **options
        )


def name_in_whole(model: ModelConfig) -> Callable[[str], str] | None:
    """Return what turns the name of a weight of the text part into that in the whole model that `config.json` is of.

    None where the names are equal: a config of text alone, or a class that is loaded whole.

    Raises:
        ConfigError: it has the part under names that are not known.
    """
    config, _ = load_configs(model)
    if (text := config.get_text_config()) is config:
        return None
    # Not above: these load torch, which an evaluation by a server has no other use for.
    import torch
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    if kind.config_class is not type(text):
        return None
    # What transformers does to a file's names as it loads the part, backwards, as where it saves the part's weights.
    loading = get_checkpoint_conversion_mapping(text.model_type) or []
    saving = [change.reverse_transform() for change in loading if getattr(change, "prefix_to_remove", None)]
    if not saving:  # Llama 4: the whole has a model of the part's class in it
        architectures: Any = config.architectures  # without any, vLLM does not start
        whole: Any = getattr(transformers, architectures[0])
        with quiet(), torch.device("meta"):
            parts = whole(config).named_modules()
        inside = next((name for name, part in parts if type(part) is kind), None)
        if inside is None:
            says = f"vLLM loads all of {whole.__name__}, which has no {kind.__name__} in it; use engine=transformers"
            raise ConfigError(f"model.path: {model.path}: {says}")
        return lambda name: f"{inside}.{name}"

    def renamed(name: str) -> str:
        for change in saving:
            name, _ = change.rename_source_key(name)
        return name

    return renamed


def processor_files(model: ModelConfig, config: PreTrainedConfig) -> tuple[Path, ...]:
    """Return the files of `model` that say how it reads images and sounds: libraries that load all of it need them.

    Args:
        config: of what was loaded, which may be the text part alone.
    """
    return () if config.get_text_config() is config else _processors(_source(model), model.revision)


@cache  # so that no save and no push asks the hub again
def _processors(source: str, revision: str | None) -> tuple[Path, ...]:
    from transformers.utils.hub import cached_file

    options: dict[str, Any] = {
        "revision": revision,
        "local_files_only": _offline(source),
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    found = [cached_file(source, name, **options) for name in PROCESSORS]
    return tuple(Path(file) for file in found if file is not None)


@contextmanager
def _refusing(model: ModelConfig, part: str) -> Iterator[None]:
    """Turn whatever a loader raises into one sentence: each library and each file format has errors of its own."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_unloadable(model, part, error)) from error


def _finder(model: ModelConfig, part: str = "") -> Callable[[str], str | None]:
    """Return what finds a file of `model` by its name; of a hub id it is loaded from the hub."""
    from transformers.utils.hub import cached_file

    source = _source(model, part)
    # The path of none that the model does not have: it has its weights in one of several kinds of files.
    return lambda name: cached_file(
        source,
        name,
        revision=model.revision,
        local_files_only=_offline(source),
        _raise_exceptions_for_missing_entries=False,
    )


def _source(model: ModelConfig, part: str = "") -> str:
    """Return the folder or hub id of `model`, checked as far as the network is not needed."""
    refuse(gone_problems("model.path", model.path))
    source = local_path(model.path)
    if part == "tokenizer" and (Path(source) / "tokenizer_config.json").is_file():
        return source  # also beside an adapter alone
    local = model.path.startswith((".", "/", "~")) or model.path.count("/") > 1 or Path(source).exists()
    if local and not (Path(source) / "config.json").is_file():
        fault = "has no config.json" if Path(source).is_dir() else "is no folder"
        if (Path(source) / "adapter_config.json").is_file():
            fault = "is an adapter alone, which mmrl eval and algo.teachers take as a policy"
        raise ConfigError(f"model.path: '{model.path}' {fault}, expected the folder of a saved model or a hub id")
    return source


def _offline(source: str) -> bool:
    """Return True to load only files of this machine: a folder, or a hub id while the hub is away."""
    return Path(source).is_dir() or not hub_answers()


def _cannot(model: ModelConfig, part: str) -> str:
    revision = f" at revision '{model.revision}'" if model.revision else ""
    return f"cannot load the {part} of '{model.path}'{revision}"


def _unloadable(model: ModelConfig, part: str, error: Exception) -> str:
    reason = reason_of(error)
    if "automatic conversion of the weights" in reason:
        reason = "some of those that are held together, such as the experts', are missing or of other sizes"
    if Path(local_path(model.path)).is_dir():
        file = Path(local_path(model.path)) / "config.json"
        if isinstance(error, TypeError | LookupError | ArithmeticError | AttributeError):
            reason = _unknown_value(file, error) or f"{file} has a value that none can be made of: {reason}"
    else:
        if not hub_answers():
            reason = "no such folder, and the hub does not answer (nor is it in the local cache)"
        # A hub may answer and then not serve; of some models there is another source.
        reason += nearest(model.path, tuple(SHIPPED)) + from_index(model.path)
    return f"model.path: {_cannot(model, part)}: {reason}"


def _unknown_value(config: Path, error: Exception) -> str | None:
    """Return the key of a config whose value transformers has looked for in vain, in words; None for another error."""
    if not isinstance(error, KeyError) or not error.args:
        return None
    with suppress(OSError, ValueError, AttributeError):
        for path, value in iter_leaves(json.loads(config.read_text(encoding="utf-8"))):
            if value == error.args[0] or (isinstance(value, list) and error.args[0] in value):
                return f"{config}: {path} is '{error.args[0]}', which this transformers does not have"
    return None


def _dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    import torch

    if model.dtype == "auto":
        # Where a GPU only emulates bfloat16, nothing is gained for the lost digits.
        computes = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if computes else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[model.dtype]
