"""A retriever server as a child process: started, checked, stopped by mmrl. Used where `task.retriever.process=child`.

The child serves an index folder on a free port of this machine. It ends with `close`, at exit, and by itself when this
process is gone, however that came about.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mmrl.errors import RetrievalFailure
from mmrl.retrieval.base import Document
from mmrl.retrieval.remote import RemoteRetriever

START_S = 300.0
"""Longest wait for a child to listen: it loads its index first."""
STOP_S = 5.0

LISTENING = "listening on "


class ChildRetriever:
    """Searches through a server of its own; the server starts at once, and the first search waits until it is up.

    Args:
        index: folder made by `build_index`.
        arguments: more arguments of `mmrl serve-retriever` (`device=cuda`).
        client: settings of `RemoteRetriever`.
    """

    def __init__(self, index: Path, arguments: Sequence[str] = (), **client: Any):
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        command = [sys.executable, "-m", "mmrl", "serve-retriever", f"index={index.resolve()}", "port=0"]
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [*command, f"parent={os.getpid()}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        self._owner = os.getpid()
        self._client: RemoteRetriever | None = None
        self._settings = client
        self._lock = threading.Lock()
        _ALL.add(self)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """See `RemoteRetriever.search`."""
        return self.client().search(queries, top_k)

    async def search_async(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """See `RemoteRetriever.search_async`. The very first search blocks until the child listens."""
        return await self.client().search_async(queries, top_k)

    @property
    def counts(self) -> dict[str, int]:
        """See `RemoteRetriever.counts`."""
        return dict(self._client.counts) if self._client else {}

    def client(self) -> RemoteRetriever:
        """The client of the child, once the child is healthy.

        Raises:
            RetrievalFailure: it ended, or does not listen within `START_S`.
        """
        with self._lock:
            if self._client is None:
                url = self._url()
                self._healthy(url)
                self._client = RemoteRetriever(url, **self._settings)
            elif self._process.poll() is not None:
                raise RetrievalFailure(f"the retriever server ended: {self._last_words()}", "connection")
            return self._client

    def _url(self) -> str:
        found: list[str] = []
        assert self._process.stdout is not None
        reader = threading.Thread(target=lambda: found.append(self._first_line()), daemon=True)
        reader.start()
        reader.join(START_S)
        if not found or not found[0].startswith(LISTENING):
            self._stop()
            raise RetrievalFailure(f"the retriever server did not start: {self._last_words()}", "connection")
        return found[0].removeprefix(LISTENING).strip()

    def _first_line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(LISTENING):
                return text
        return ""

    def _healthy(self, url: str) -> None:
        deadline = time.monotonic() + START_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know this machine
        while True:
            try:
                with opener.open(f"{url}/health", timeout=5) as reply:
                    if json.load(reply).get("status") == "ok":
                        return
            except (OSError, ValueError) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._stop()
                    raise RetrievalFailure(
                        f"the retriever server is not healthy ({error}): {self._last_words()}", "connection"
                    ) from None
            time.sleep(0.02)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f"exit code {self._process.returncode}" + (f", {said[-1]}" if said else "")

    def close(self) -> None:
        """Stop the child; further searches fail."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._stop()

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


_ALL: weakref.WeakSet[ChildRetriever] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for child in list(_ALL):
        if child._owner == os.getpid():  # not in a fork
            child._stop()
