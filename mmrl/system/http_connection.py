"""Connections of an HTTP server of this process: the time for a header, and whether the client is still there.

Imported where a server starts: uvicorn is.
"""

from __future__ import annotations

import asyncio
import socket

from typing_extensions import override
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_S = 30.0
"""Seconds for the header of a request, from the connection, or from its first byte on a connection that is kept."""
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Response that every client passes over, waiting for its own."""
FIRST_PROBE_S, LAST_PROBE_S = 0.001, 1.0
"""Waits between probes of a client that sends no more, each twice the one before."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's connection, which ends without a complete header, and outlives the end of what its client sends."""

    _patience: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def eof_received(self) -> bool:
        """Go on for a client that has sent all it will, while a whole request of it is under way."""
        if self._idle or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self._probe(FIRST_PROBE_S)
        return True

    def _probe(self, wait_s: float) -> None:
        """Find out whether the client waits for its reply: one that has gone looks the same until something is sent."""
        # A client of HTTP 1.0 knows no interim responses: it is taken to be there.
        old = self.scope["http_version"] == "1.0"
        if self._idle or self.cycle.response_started or self.transport.is_closing() or old:
            return
        self.transport.write(INTERIM)
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(wait_s, self._probe, min(2 * wait_s, LAST_PROBE_S))

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        """Give a header its time, from its first byte; a request under way has its own."""
        if not self._idle:
            self._stop_waiting()
        elif self._patience is None:
            self._patience = self.loop.call_later(HEADER_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
