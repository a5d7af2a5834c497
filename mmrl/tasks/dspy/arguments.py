"""Checks of user code by signature: it takes the arguments that it will get, known before it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mmrl.tasks.dspy.base import awaits


def refusing_signature(function: Callable[..., Any], *args: object, **named: object) -> str | None:
    """Return a function's parameter list as text, if it cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of compiled code, which does not say
        return None
    try:
        signature.bind(*args, **named)
    except TypeError:
        parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return None


def required_arguments(function: Callable[..., Any], count: int) -> int:
    """Count the positional arguments without a default after the first `count`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return 0
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional[count:])


def metric_problem(metric: Callable[..., Any], extra_arguments: bool) -> str | None:
    """Explain why a metric cannot be called with a record and a prediction: the words after its name.

    Args:
        extra_arguments: True if it gets None for further arguments, as metrics for DSPy may have them.
    """
    extra_count = required_arguments(metric, 2) if extra_arguments else 0
    takes = refusing_signature(metric, None, None, *(None,) * extra_count)
    return None if takes is None else f"takes {takes}, expected a function (record, prediction) -> number"


def inputs_problem(module: Any, fields: Sequence[str]) -> str | None:
    """Explain why a `dspy.Module` cannot be called with these fields as keywords: the words after "got FIELDS"."""
    name = "aforward" if awaits(module) else "forward"
    # Not by `module.forward`: DSPy takes that for a call which goes around its own.
    method = vars(module).get(name) or getattr(type(module), name, None)
    if method is None:
        return None  # its rollouts tell
    bound = method if name in vars(module) else method.__get__(module)
    takes = refusing_signature(bound, **dict.fromkeys(fields))
    return None if takes is None else f"but {type(module).__name__}.{name} takes {takes}"
