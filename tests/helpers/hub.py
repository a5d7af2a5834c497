"""A Hugging Face hub on this machine that takes uploads: what `HfApi.create_repo` and `upload_folder` ask for."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What was uploaded, by repository."""

    def __init__(self) -> None:
        self.created: dict[str, bool] = {}
        """Repository -> whether it is private."""
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        """SHA-256 -> content, of files that go to large file storage."""
        self.cards: list[str] = []
        self.commits = 0
        self.tokens: set[str] = set()
        self.refuse = ""
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of a request."""
        if path.startswith("/lfs/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/")
            self.large[path.removeprefix("/lfs/")] = body
            return 200, {}
        if path == "/api/validate-yaml":
            self.cards.append(json.loads(body)["content"])
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**wanted, "actions": {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}}
                for wanted in json.loads(body)["objects"]
            ]
            return 200, {"objects": objects}
        name, _, action = path.removeprefix("/api/models/").partition("/preupload/")
        if action:
            files = [
                {"path": file["path"], "uploadMode": mode(file["path"]), "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        name, _, action = path.removeprefix("/api/models/").partition("/commit/")
        if action:
            return self._commit(name, [json.loads(line) for line in body.decode().splitlines()])
        name = name.partition("/revision/")[0]
        if method == "GET" and name in self.created:
            return 200, {"id": name, "private": self.created[name], "sha": "0" * 40, "siblings": []}
        return 404, {"error": "Repository not found"}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        if self.refuse:
            return 403, {"error": self.refuse}
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        self.created[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.files[name] = {}
        return 200, {"url": f"{self.url}/{name}"}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        self.commits += 1
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[name][value["path"]] = self.large[value["oid"]]
        oid = "1" * 40
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}"}


def mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that listens until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing is printed for each request."""

        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "/lfs/" not in self.path:
                hub.tokens.add(self.headers.get("Authorization", ""))
            status, reply = hub.answer(self.command, self.path.partition("?")[0], body)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _reply

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
