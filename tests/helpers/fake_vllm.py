"""Stand-in for the Python that runs vLLM: a process that serves like it, without a model."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

SERVER = """#!{python}
# Adapters by name, one token for each completion, a log of what it was asked.
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
if "-c" in sys.argv:
    sys.exit(0)
host, port = sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])
adapters = set()
log = open(os.path.join(os.path.dirname(__file__), f"asked-{{os.getpid()}}.jsonl"), "a", buffering=1)
probe = {probe}

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        status, answer = 200, "Success"
        if self.path == "/v1/models":
            answer = {{"data": [{{"id": name, "max_model_len": {context}}} for name in ("base", *adapters)]}}
        elif self.path == "/v1/load_lora_adapter" and body:
            adapters.add(body["lora_name"])
        elif self.path == "/v1/completions" and "prompt_logprobs" in body:
            tokens = body["prompt"][1:]
            values = zip(tokens, probe or [-1.0] * len(tokens))
            rows = [None] + [{{str(token): {{"logprob": value}}}} for token, value in values]
            answer = {{"choices": [{{"prompt_logprobs": rows}}]}}
        elif self.path == "/v1/completions":
            time.sleep(0.1)
            if body["model"] not in adapters:
                status, answer = 404, "no such adapter"
            choice = {{"token_ids": [2], "logprobs": {{"token_logprobs": [-0.5]}}, "finish_reason": "stop"}}
            answer = {{"choices": [choice]}} if status == 200 else answer
        log.write(json.dumps([self.path, self.headers.get("X-Session-ID"), body and body.get("lora_name")]) + "\\n")
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer((host, port), Handler).serve_forever()
"""


def fake_vllm(folder: Path, context: int = 64, probe: Sequence[float] = ()) -> str:
    """Write the program for `engine.python`; its servers log to `asked-PID.jsonl` in the folder.

    Args:
        probe: log-probabilities that it answers a probe with; empty: -1 each.
    """
    program = folder / "python"
    program.write_text(SERVER.format(python=sys.executable, context=context, probe=json.dumps(list(probe))))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def adapter_in(folder: Path) -> dict[str, str]:
    """Folders of adapters, with one of rank 8, as an engine without a model is given them."""
    adapter = folder / "adapter"
    adapter.mkdir(exist_ok=True)
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    return {"default": str(adapter)}
