"""The LM and the adapter that DSPy sees in a rollout: each request a `ctx.call` that knows how its reply is parsed.

DSPy's behaviour stays as it is but for what would hide calls: no LM cache, and no second request in JSON when a reply
does not parse (the failure is recorded instead, with its raw text).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import dspy
from dspy.utils.exceptions import AdapterParseError

from mmrl.errors import ParseFailure, ProgramFailure
from mmrl.rollout.dspy.host import Host, Parse
from mmrl.system.replies import quoted
from mmrl.tasks.base import Message
from mmrl.tasks.dspy.fields import within_bounds

Fields = Mapping[str, object]
"""Inputs or outputs of a signature, by name."""
Signature = type[dspy.Signature]
Demos = Sequence[Fields]


class TapeLM(dspy.BaseLM):
    """The LM of a rollout: hands each request to `ctx.call`."""

    def __init__(self, host: Host, parse: Parse | None = None):
        super().__init__(model="mmrl", cache=False)
        self.host, self.parse = host, parse

    def __call__(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **options: object
    ) -> list[str]:
        """Called by adapters."""
        return [self.host.wait(self._asked(prompt, messages, options))]

    async def acall(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **options: object
    ) -> list[str]:
        """Called by adapters."""
        return [await self.host.awaited(self._asked(prompt, messages, options))]

    async def _asked(self, prompt: str | None, messages: Sequence[Message] | None, options: Fields) -> str:
        # A predictor's adapter sends messages; a plain prompt comes from a module that calls its LM itself.
        sent = messages if messages is not None else [{"role": "user", "content": prompt or ""}]
        return await self.host.call(sent, self.parse, {**self.kwargs, **options})

    def copy(self, **options: object) -> dspy.BaseLM:
        """What `BestOfN` and `Refine` ask for at each attempt, or a program that sets options for some requests."""
        # A number for DSPy's cache, and DSPy's way to get other replies: here each request has a seed of its own.
        if set(options) == {"rollout_id", "temperature"} and options["temperature"] == 1.0:
            options = {}
        made: dspy.BaseLM = super().copy(**options)
        return made

    def bound(self, parse: Parse) -> TapeLM:
        """The same LM, for one request with this parser."""
        # A copy per request: concurrent requests of one rollout have different parsers.
        other = copy.copy(self)
        other.parse = parse
        return other


class TapeAdapter(dspy.Adapter):
    """Put before the user's class of adapters; gives each request the parser of its reply.

    A subclass of the user's and no wrapper around it: `ReAct` and `Refine` use adapters' other methods and their class.
    """

    def __call__(
        self, lm: dspy.BaseLM, lm_kwargs: Fields, signature: Signature, demos: Demos, inputs: Fields
    ) -> list[Fields]:
        """See `dspy.Adapter.__call__`."""
        fields: list[Fields] = super().__call__(
            self._bound(lm, lm_kwargs, signature, inputs), lm_kwargs, signature, demos, inputs
        )
        return fields

    async def acall(
        self, lm: dspy.BaseLM, lm_kwargs: Fields, signature: Signature, demos: Demos, inputs: Fields
    ) -> list[Fields]:
        """See `dspy.Adapter.acall`."""
        fields: list[Fields] = await super().acall(
            self._bound(lm, lm_kwargs, signature, inputs), lm_kwargs, signature, demos, inputs
        )
        return fields

    def _bound(self, lm: dspy.BaseLM, lm_kwargs: Fields, signature: Signature, inputs: Fields) -> TapeLM:
        if not isinstance(lm, TapeLM):
            raise ProgramFailure(f"a predictor was called with an LM of its own ({type(lm).__name__})")
        # DSPy's own steps before and after a request, so that what counts as parsed is what DSPy returns.
        processed = self._call_preprocess(lm, dict(lm_kwargs), signature, dict(inputs))

        def postprocessed(signature: Signature, text: str) -> object:
            return self._call_postprocess(processed, signature, [text], lm, {})

        def parse(text: str) -> None:
            try:
                within_bounds(signature, text, postprocessed)
            except AdapterParseError as error:
                raise parse_failure(error, signature) from error

        return lm.bound(parse)


def tape_adapter(inner: dspy.Adapter) -> dspy.Adapter:
    """The user's adapter as a rollout uses it; the user's own stays as it is."""
    kind = _tape_class(cast("Hashable", type(inner)))
    made: dspy.Adapter = kind.__new__(kind)
    made.__dict__.update(inner.__dict__)
    if hasattr(made, "use_json_adapter_fallback"):
        made.use_json_adapter_fallback = False
    return made


def _inherited(kind: Any) -> Any:
    # DSPy gives each subclass `format` and `parse` of its own, which would stand before those of the user's class.
    del kind.format, kind.parse
    return kind


_inherited(TapeAdapter)


@functools.cache
def _tape_class(kind: Any) -> Any:
    return _inherited(type(kind.__name__, (TapeAdapter, kind), {}))


def parse_failure(error: AdapterParseError, signature: Signature) -> ParseFailure:
    """What a reply that DSPy could not read is in the record: how many of its output fields were there."""
    expected = list(signature.output_fields)
    # a value of the wrong type is raised with its cause, or without any result: then nothing counts as read
    wrong_type = error.parsed_result is None or error.__cause__ is not None
    read = [] if wrong_type else [name for name in expected if name in error.parsed_result]
    # DSPy's message quotes the whole reply
    reason = quoted(str(error.message))
    missing = ", ".join(name for name in expected if name not in read)
    return ParseFailure(reason if wrong_type else f"output fields missing: {missing}", len(read), len(expected))
