"""A Hugging Face hub on this machine with one model, which it sends slowly: `python -m scripts.chaos.hub`.

It prints its port. What `HF_ENDPOINT` must answer for `from_pretrained` to load `chaos/tiny`: the head and the content
of each file, and that other files are not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mmrl.models.load import ASSETS

MODEL = "chaos/tiny"
COMMIT = "c" * 40
FOLDER = ASSETS / "tiny"
CHUNK, PAUSE_S = 1 << 16, 0.02


class Hub(BaseHTTPRequestHandler):
    """Answers for one model."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """The head of a file."""
        self._answer(content=False)

    def do_GET(self) -> None:
        """A file, or what the model consists of."""
        self._answer(content=True)

    def log_message(self, *_: object) -> None:
        """Nothing is printed for each request."""

    def _answer(self, *, content: bool) -> None:
        if self.path.startswith(f"/api/models/{MODEL}") and "/tree/" not in self.path:
            siblings = [{"rfilename": path.name} for path in FOLDER.iterdir()]
            self._send(json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode(), content)
            return
        name = self.path.partition("?")[0].rpartition("/")[2]
        if f"{MODEL}/resolve/" in self.path and (FOLDER / name).is_file():
            self._send((FOLDER / name).read_bytes(), content)
            return
        self.send_response(200 if self.path == "/" else 404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, content: bool) -> None:
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0] or 0)
        self.send_response(206 if first else 200)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        for key, value in (headers | {"Content-Length": str(len(data) - first)}).items():
            self.send_header(key, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for start in range(first, len(data) if content else 0, CHUNK):
                self.wfile.write(data[start : start + CHUNK])
                time.sleep(PAUSE_S)


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
