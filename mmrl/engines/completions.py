"""Chat completions as JSON: the body of a request by an endpoint's settings, and what a reply says and cost."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from mmrl.config.endpoint import SENT, Endpoint, EndpointConfig
from mmrl.secrets import hide
from mmrl.system.http_client import HttpFailure

CHARS_PER_TOKEN = 256
"""Characters of a completion for each token of the limit, beyond which it is refused; few tokens have so many."""
MOST_TOKENS = 10**9
"""A reply that counts more has miscounted."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""The two names of the limit of new tokens."""
_THIS_ONE = re.compile(
    r"context_length_exceeded|context (length|window|size)|prompt is too long|content[_ ](filter|policy|management)",
    re.IGNORECASE,
)
"""What servers say of a prompt beyond their context, or of one that a filter stopped."""
_REFUSED = re.compile(
    r"unsupported|not support|not permitted|not allowed|unknown|unrecognized|unexpected", re.IGNORECASE
)
_CUT_OFF = ("error", "abort")
"""Finish reasons of replies that their server could not end."""
_CUT = re.compile(r"max_tokens or model output limit", re.IGNORECASE)
_THINK, _END = "<think>", "</think>"


@dataclass(slots=True)
class Usage:
    """Requests to an endpoint and what they cost; written in the I/O loop alone."""

    requests: int = 0
    """Completions received."""
    retries: int = 0
    failures: int = 0
    """Completions given up."""
    unanswered: int = 0
    """Completions that ended within their reasoning, with no answer."""
    prompt_tokens: int = 0
    """Tokens of the prompts, as the endpoint counts them."""
    cached_tokens: int = 0
    """Prompt tokens that came from the endpoint's cache."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Completion tokens of the reasoning, where the endpoint reports them."""
    cost: float = 0.0
    """USD by the configured prices."""

    def metrics(self, prefix: str = "endpoint") -> dict[str, float]:
        """Return the counters by metric name."""
        return {f"{prefix}/{name}": float(count) for name, count in asdict(self).items()}

    def add(self, reply: Reply, settings: Endpoint) -> None:
        """Count a completion."""
        self.requests += 1
        self.unanswered += reply.unanswered
        self.prompt_tokens += reply.prompt_tokens
        self.cached_tokens += reply.cached_tokens
        self.completion_tokens += reply.completion_tokens
        self.reasoning_tokens += reply.reasoning_tokens
        cached = settings.price_in if settings.price_cached is None else settings.price_cached
        spent = (reply.prompt_tokens - reply.cached_tokens) * settings.price_in + reply.cached_tokens * cached
        self.cost += (spent + reply.completion_tokens * settings.price_out) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Completion of an endpoint."""

    text: str
    """Text of the answer; see `Endpoint.reasoning`."""
    finish: str
    """The endpoint's finish reason (`stop`, `length`, …)."""
    unanswered: bool
    """True if it ended within its reasoning."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


def request_body(
    settings: EndpointConfig, messages: Sequence[Mapping[str, str]], options: Mapping[str, object], limit: str
) -> dict[str, object]:
    """Return the body of one request.

    Args:
        options: settings of this request (`temperature`, `max_tokens`, …); those that are None are not sent.
        limit: name of the limit of new tokens, one of `LIMITS`.
    """
    body: dict[str, object] = {"model": settings.model, "messages": [dict(message) for message in messages]}
    settings_sent = {name: value for name, value in options.items() if value is not None and name not in settings.omit}
    body |= {limit if name == LIMITS[0] else name: value for name, value in settings_sent.items()}
    return body | settings.extra_body


def asks_for_the_other_limit(body: Mapping[str, object], status: int, text: str) -> bool:
    """Return True if a refusal says that the limit of new tokens has to be called `max_completion_tokens`."""
    # vLLM names both where the limit leaves no room for the prompt.
    asks = status in (400, 422) and LIMITS[0] in body and LIMITS[1] in text
    return asks and not refuses_this_one(status, text)


def cut_at_the_limit(status: int, text: str) -> bool:
    """Return True if a refusal says that a limit was too low for the model's reasoning: the endpoint takes requests."""
    return status == 400 and _CUT.search(text) is not None


def remedy(path: str, body: Mapping[str, object], status: int, text: str) -> str:
    """Return advice for a refusal that names a setting which the model does not take; else nothing."""
    if asks_for_the_other_limit(body, status, text):
        return f" (set {path}.max_tokens_field={LIMITS[1]})"
    if status not in (400, 422) or not _REFUSED.search(text):
        return ""
    refused = [name for name in SENT if name in body and re.search(rf"\b{name}\b", text)]
    return f" (leave it out: {path}.omit=[{','.join(refused)}])" if refused else ""


def refuses_this_one(status: int, text: str) -> bool:
    """Return True for a refusal of one request, not of all: its prompt is too long, or filtered for its content."""
    return status in (200, 400, 413, 422) and _THIS_ONE.search(text) is not None


def check_length(text: str, body: Mapping[str, object]) -> None:
    """Refuse a completion of many times the limit of tokens: tokenizing megabytes takes seconds.

    Raises:
        HttpFailure: it is that long.
    """
    limit = next((value for name in LIMITS if isinstance(value := body.get(name), int)), None)
    if limit is not None and len(text) > CHARS_PER_TOKEN * limit:
        raise HttpFailure("garbage", f"a completion of {len(text)} characters for max_tokens={limit}")


def check_unfiltered(reply: Reply) -> None:
    """Refuse a reply that a filter stopped: what is left of it is not what the model says.

    Raises:
        HttpFailure: it is one.
    """
    if refuses_this_one(200, reply.finish):
        raise HttpFailure("garbage", f"finish_reason '{reply.finish}'", status=200, text=reply.finish)


def read_completion(content: bytes, reasoning: str = "drop") -> Reply:
    """Read a reply.

    Args:
        reasoning: `Endpoint.reasoning`.

    Raises:
        ValueError: it is no chat completion, or its server could not end it; with the reply's text.
    """
    try:
        reply = json.loads(content)
        choice = reply["choices"][0]
        text, thoughts = _parts(choice["message"])
        usage = reply.get("usage")
        prompt = _count(usage, "prompt_tokens")
        cached = _count(usage, "prompt_tokens_details", "cached_tokens") or _count(usage, "prompt_cache_hit_tokens")
        completion = _count(usage, "completion_tokens")
        thought = _count(usage, "completion_tokens_details", "reasoning_tokens")
        # after decoding: a server may have spelled the key in escapes
        answer, finish = hide(text), hide(str(choice.get("finish_reason") or "stop"))
        if finish in _CUT_OFF:
            raise ValueError(f"finish_reason '{finish}'")
        answered = with_reasoning(answer, hide(thoughts), reasoning)
        return Reply(
            text=answered,
            finish=finish,
            unanswered=finish == "length" and not answered.strip() and bool(thoughts or text or thought),
            prompt_tokens=prompt,
            cached_tokens=min(cached, prompt),
            completion_tokens=completion,
            reasoning_tokens=min(thought, completion),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        # not its repr: that of a decoding error holds the whole reply
        reason = f"{type(error).__name__}: {error}"
        text = content.decode(errors="replace")
        raise ValueError(f"the reply is no chat completion ({reason}): {text}") from None


def with_reasoning(answer: str, thoughts: str, reasoning: str) -> str:
    """Return the text of a reply, as `Endpoint.reasoning` wants it.

    Args:
        answer: the reply's content.
        thoughts: what the server gave beside it.
    """
    if reasoning == "keep" and thoughts:
        return f"{_THINK}\n{thoughts.strip()}\n{_END}\n\n{answer}"
    if reasoning != "cut":
        return answer
    # Some templates open the block in the prompt, so that the reply begins inside of it.
    before, closed, after = answer.partition(_END)
    if closed and (before.lstrip().startswith(_THINK) or _THINK not in before):
        return after.lstrip()
    return "" if answer.lstrip().startswith(_THINK) else answer


def _parts(message: Mapping[str, object]) -> tuple[str, str]:
    """Return a message's answer and reasoning, which servers call by two names or put among the content's parts."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    content = message.get("content") if thoughts else message["content"]  # some leave an empty answer out
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    text = message.get("refusal") or "" if content is None else content
    if not isinstance(text, str):
        raise TypeError("the content is not text")
    # JSON can spell half of an emoji (a reply cut within one); no tokenizer or file can.
    parts = (text, thoughts if isinstance(thoughts, str) else "")
    answer, reasoning = (part.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for part in parts)
    return answer, reasoning


def _count(usage: object, *names: str) -> int:
    """Return a number of tokens as the endpoint counts them; 0 where it says none."""
    for name in names:
        usage = usage.get(name) if isinstance(usage, Mapping) else None
    return usage if isinstance(usage, int) and 0 < usage <= MOST_TOKENS else 0
