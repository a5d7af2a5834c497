"""A file of replies: what a search has asked of models, so that one that was killed goes on and asks nothing twice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mmrl import rng
from mmrl.errors import CheckpointError, DataError
from mmrl.system.files import JsonObject, append_jsonl, dumps, plain, read_jsonl, repair_jsonl


class Memo:
    """Replies by request and by how often the request was made before.

    n equal requests are n lines, and a process that makes them again gets the same n replies in the same order. A
    request that fails has no line, so it is made again. Greedy requests have one line, however often they are made.

    Args:
        path: the file, which need not exist; a line that a kill has torn is dropped.

    Raises:
        CheckpointError: another line is damaged.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        repair_jsonl(path)
        self._path = path
        # As text, of which a reply's tokens are many times larger objects.
        self._replies = {key: dumps(reply) for key, reply in read_replies(path).items()}
        self._times = Counter[str]()
        self._used = set[str]()
        self._asking: dict[str, asyncio.Event] = {}

    async def reply(
        self,
        request: Mapping[str, object],
        ask: Callable[[int], Awaitable[JsonObject]],
        *,
        greedy: bool = False,
        used: Callable[[JsonObject], None] = lambda reply: None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> JsonObject:
        """Return the reply to a request, from the file or asked for now. Equal requests come on one event loop.

        Args:
            request: all that the reply depends on.
            ask: maps its number among equal requests, from 1, to the reply, which is stored before it is returned.
            used: called with each reply that this process uses for the first time, also one from the file.
            waiting: entered while the same greedy request is under way elsewhere.
        """
        digest = f"{rng.digest(json.dumps(plain(request), sort_keys=True)):032x}"
        self._times[digest] = number = 1 if greedy else self._times[digest] + 1
        key = f"{digest}-{number}"
        while (asked := self._asking.get(key)) is not None:
            with waiting():
                await asked.wait()
        if key not in self._replies:
            self._asking[key] = asyncio.Event()
            try:
                asked_now = await ask(number)
                append_jsonl(self._path, [{"key": key, "reply": asked_now, "digest": _digest(key, plain(asked_now))}])
                self._replies[key] = dumps(asked_now)
            finally:
                self._asking.pop(key).set()
        reply: JsonObject = json.loads(self._replies[key])
        if key not in self._used:
            self._used.add(key)
            used(reply)
        return reply


def read_replies(path: Path) -> dict[str, JsonObject]:
    """Return the replies in a memo, by key.

    Raises:
        CheckpointError: a line is damaged; it names the line, and what to do.
    """
    way_out = f"restore {path.parent} from a copy, or delete it to begin the search anew"
    try:
        lines = read_jsonl(path)
    except DataError as error:
        raise CheckpointError(f"{error}; {way_out}") from None
    for number, line in enumerate(lines, start=1):
        if not line.keys() >= {"key", "reply"} or line.get("digest") != _digest(line["key"], line["reply"]):
            raise CheckpointError(f"{path}:{number}: damaged, expected a key and a reply with their digest; {way_out}")
    return {line["key"]: line["reply"] for line in lines}


def _digest(key: str, reply: JsonObject) -> str:
    """Return what tells a line that was changed, whose reply would make another search of it."""
    return f"{rng.digest(key, json.dumps(reply, sort_keys=True)):032x}"
