"""A child process without a log of its own: started without waiting, quoted, and gone with its file."""

from __future__ import annotations

import sys

import pytest

from mmrl.errors import RetrievalFailure
from mmrl.system.child_process import ChildProcess

SERVER = """
import http.server, sys
print("loading", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def child(program: str) -> ChildProcess:
    return ChildProcess(
        lambda port: [sys.executable, "-c", program, str(port)],
        timeout_s=30.0,
        failure=lambda text: RetrievalFailure(text, "connection"),
    )


def test_it_is_launched_first_and_waited_for_later() -> None:
    server = child(SERVER)
    server.launch()
    assert server.alive
    server.wait_until_ready()
    assert "loading" in server.log_tail()
    server.stop()
    assert not server.alive
    log = server.log
    del server
    assert not log.exists()


def test_its_end_is_the_callers_kind_of_failure() -> None:
    with pytest.raises(RetrievalFailure, match=r"(?s)ended with code 1 .*its log ends with:.*no index"):
        child("import sys; sys.exit('no index')").start()
