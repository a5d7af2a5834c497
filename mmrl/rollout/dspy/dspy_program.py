"""Any `dspy.Module` as a program: each of its predictors is a module, each of its LM requests a `ctx.call`.

Sits between DSPy, which renders prompts and parses replies, and `rollout.context`, which samples and records. Importing
this file imports DSPy (seconds), so only tasks that need it do (`rollout.with_program`).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError
from dspy.utils.parallelizer import ParallelExecutor
from pydantic_core import PydanticSerializationError, to_jsonable_python

from mmrl.errors import ProgramFailure
from mmrl.records import Call, Example
from mmrl.rollout.dspy.adapter import Fields, TapeLM, parse_failure, tape_adapter
from mmrl.rollout.dspy.host import Host
from mmrl.rollout.dspy.own_tools import record_tools
from mmrl.rollout.dspy.structure import Structure
from mmrl.system.user_code import in_thread
from mmrl.tasks.base import Context
from mmrl.tasks.dspy import tools as tape
from mmrl.tasks.dspy.fields import within_bounds


class DspyProgram:
    """Implements `mmrl.tasks.base.Program` around a `dspy.Module`, which is called with `example.inputs` as keywords.

    `modules` are the attribute paths of the predictors (`craft.predict`); see `Structure`. Of `forward` and `aforward`
    the one of the most derived class runs, `aforward` where it has both. `aforward` runs on the event loop,
    `forward` in a thread of its own for each rollout (a shared pool would deadlock: a deterministic engine waits until
    all live programs wait in it). The prediction is what the module returns; `description` gives it as JSON values.

    A reply that the adapter cannot parse is retried as `parse_retries` says and then ends the rollout, even where the
    module catches the exception: `present_fields` / `expected_fields` of the failing call are the output fields that
    were read and those of the signature (0 read where a value has the wrong type).

    Raises:
        ConfigError: a program that cannot be trained, by its structure; see `Structure`.
    """

    def __init__(self, module: dspy.Module):
        self.module = module
        self.structure = Structure(module)
        self.modules = self.structure.modules
        record_tools(tool for _, tool in module.named_sub_modules(dspy.Tool))

    def save(self, path: Path) -> None:
        """Write the predictors' prompts and demonstrations to a `.json` file that plain DSPy's `load` reads."""
        self.module.save(str(path))

    def canonical(self, call: Call) -> str | None:
        """See `mmrl.tasks.base.Canonical`: the adapter's own text of the fields that it parsed."""
        adapter = dspy.settings.adapter or dspy.ChatAdapter()
        signature = self.structure.signature(call.module)
        try:
            fields = within_bounds(signature, call.text, adapter.parse)
        except AdapterParseError as error:
            raise parse_failure(error, signature) from error
        return self.written(call.module, fields)

    def written(self, module: str, fields: Fields) -> str:
        """The adapter's own text of a predictor's output fields."""
        adapter = dspy.settings.adapter or dspy.ChatAdapter()
        return str(adapter.format_assistant_message_content(self.structure.signature(module), fields))

    def description(self, prediction: Any) -> object:
        """See `mmrl.tasks.base.Described`."""
        return _plain(prediction)

    async def run(self, example: Example, ctx: Context) -> object:
        """See `mmrl.tasks.base.Program.run`."""
        host = Host(ctx, self.structure, asyncio.get_running_loop())
        adapter = tape_adapter(dspy.settings.adapter or dspy.ChatAdapter())
        settings = {"lm": TapeLM(host), "adapter": adapter, "disable_history": True, "track_usage": False, "trace": []}
        try:
            # DSPy's settings are context variables: rollouts that run at once do not see each other's.
            with dspy.context(**settings), tape.running(host):
                if _awaits(self.module):
                    output: object = await self.module.acall(**example.inputs)
                else:
                    output = await in_thread(self.module, **example.inputs)
        except Exception:
            # what ended the rollout, not what the module or DSPy made of it
            host.raise_failure()
            raise
        finally:
            host.close()
        host.raise_failure()
        return output


def _awaits(module: dspy.Module) -> bool:
    """Whether `aforward` is what runs: of the most derived class that has either (CodeAct inherits one for ReAct)."""
    for names in (vars(module), *map(vars, type(module).__mro__)):
        if "aforward" in names or "forward" in names:
            return "aforward" in names
    return False


def _plain(output: object) -> object:
    """The prediction as JSON values: dates as text, sets as lists, pydantic's models as mappings.

    Raises:
        ProgramFailure: it holds something else.
    """
    value = output.toDict() if isinstance(output, dspy.Example) else output
    try:
        value = to_jsonable_python(value, fallback=_fallback)
        # The journal would fail on it later, for the whole batch.
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, PydanticSerializationError) as error:
        raise ProgramFailure(
            f"the prediction cannot be written as JSON ({error}); return texts, numbers, lists"
        ) from None
    return value


def _fallback(value: Any) -> object:
    if isinstance(value, dspy.Example):
        return value.toDict()
    if hasattr(value, "tolist"):  # NumPy's and PyTorch's
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _one_after_another(self: ParallelExecutor, function: Any, data: Any) -> Any:
    """`dspy.Parallel` in a rollout: requests are numbered, sampled and replayed by their order, not by which thread is
    first; elsewhere it is DSPy's. Without its progress bar, whose list of bars rollouts at once would share."""
    if tape.current() is None:
        return _in_threads(self, function, data)
    results: list[object] = [None] * len(data)
    wrapped = self._wrap_function(function)
    for place, item in enumerate(data):
        outcome = wrapped(item)
        if self.cancel_jobs.is_set():
            raise RuntimeError("Execution cancelled due to errors or interruption.")
        if isinstance(outcome, Exception):
            self.failed_indices.append(place)
            self.exceptions_map[place] = outcome
        else:
            results[place] = outcome
    return results


_in_threads = ParallelExecutor.execute
ParallelExecutor.execute = _one_after_another
