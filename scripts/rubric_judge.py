"""A judge without a language model: `python -m scripts.rubric_judge [port=8000] [COMMAND …]`.

An endpoint of OpenAI's chat API on this machine that reads what `task.reward=judge_outcome` and `judge_turn` send to a
judge (mmrl/tasks/agents/judge.py), applies the rubric of that prompt by rules, and replies in the form that it demands.
It stands in for gpt-oss-120b where Figure 6 of arXiv 2505.11821 is drawn at scale `mini`, whose answers are single
names; it is no judge of real answers. With a command it answers until that ends, and takes over its exit code.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = 5
"""A longer answer earns nothing, as the prompt says."""
_TURN = re.compile(
    r'<turn number="\d+">\n<generated>\n(.*?)\n</generated>(?:\n<observation>\n(.*?)\n</observation>)?\n</turn>', re.S
)
_TRUTH = re.compile(r"<ground_truth>\n(.*?)\n</ground_truth>", re.S)
_COUNT = re.compile(r"then exactly (\d+) lines")
_TAG = re.compile(r"</?[a-z_]+>")


def plain(text: str) -> str:
    """Lower case, without punctuation, articles and spare blanks."""
    text = re.sub(r"[^\w\s]", "", text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def in_form(text: str, *names: str) -> bool:
    """True where its tags are one pair of each of `names`, in this order, and nothing stands outside of them."""
    expected = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    outside = re.sub("|".join(rf"<{name}>.*?</{name}>" for name in names), "", text, flags=re.S)
    return _TAG.findall(text) == expected and not outside.strip()


def answer_of(generated: str) -> str:
    """The text inside its last answer tags; nothing without any."""
    answers: list[str] = re.findall(r"<answer>(.*?)</answer>", generated, re.S)
    return answers[-1] if answers else ""


def is_right(generated: str, truths: list[str]) -> bool:
    """True where its answer is one of the ground truth."""
    answer = answer_of(generated)
    return bool(plain(answer)) and len(answer.split()) <= WORDS and plain(answer) in map(plain, truths)


def verdict(prompt: str) -> str:
    """The reply to a judge's prompt.

    Raises:
        ValueError: it is none.
    """
    if "<turn " not in prompt and "<ground_truth>" not in prompt:
        return "I judge rollouts alone."  # mmrl tries an endpoint with a word before anything starts
    # What the policy wrote inside the blocks has its angle brackets escaped, so it forges none.
    turns = [(html.unescape(text), html.unescape(seen or "")) for text, seen in _TURN.findall(prompt)]
    truth, instructions = _TRUTH.findall(prompt), prompt.rpartition("</ground_truth>")[2]
    if not turns or len(truth) != 1:
        raise ValueError("expected turns and one ground truth, as task.reward=judge_outcome sends them")
    # Several right answers are one text, separated by commas, which an answer may have too.
    truths = [html.unescape(truth[0]), *html.unescape(truth[0]).split(", ")]
    count = _COUNT.search(instructions)
    *earlier, (last, _) = turns
    right = is_right(last, truths)
    if count is None:
        return f"<reasoning> by rule </reasoning>\n<score> {float(right)} </score>"
    scores, searches = [], 0
    for generated, seen in earlier:
        searches += "<search>" in generated
        form = in_form(generated, "think", "search") and in_form(seen, "information")
        helps = any(truth and truth in plain(seen) for truth in map(plain, truths))
        scores.append((0.1 if form else -0.2) + 0.3 * helps - 0.1 * searches)
    form = in_form(last, "think", "answer") and len(answer_of(last).split()) <= WORDS
    scores.append((1.0 if right else 0.2) if form else -1.0)
    lines = "\n".join(f"Turn{number}: {score:.1f}" for number, score in enumerate(scores, 1))
    return f"<reasoning> by rule </reasoning>\n<score>\n{lines}\n</score>"


class Handler(BaseHTTPRequestHandler):
    """`POST …/chat/completions`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """The verdict, or 400 and why there is none."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            reply = verdict(json.loads(body)["messages"][-1]["content"])
            choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
            found = {"id": "by-rule", "object": "chat.completion", "created": 0, "model": "rubric"}
            code, answer = 200, found | {"choices": [choice]}
        except (ValueError, KeyError, IndexError, TypeError) as error:
            code, answer = 400, {"error": {"message": f"rubric_judge: {error}"}}
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are counted by mmrl; a line for each would hide its progress."""


class Server(ThreadingHTTPServer):
    """One thread for each connection, of which mmrl opens `task.judge.concurrency` at once."""

    daemon_threads = True
    request_queue_size = 128


def main(words: list[str]) -> int:
    """Serve until the command ends, or until Ctrl-C; 2 for a mistake, which is one sentence as mmrl's are."""
    port = words.pop(0).removeprefix("port=") if words and words[0].startswith("port=") else "8000"
    problem = ""
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        problem = f"port: got '{port}', expected a number up to 65535"
    elif words and shutil.which(words[0]) is None:
        problem = f"got '{words[0]}', expected port=NUMBER or a command"
    else:
        try:
            server = Server(("127.0.0.1", int(port)), Handler)
        except OSError as error:
            problem = f"port {port}: {error.strerror}; expected a free one (port=8001)"
    if problem:
        print(f"error: rubric_judge: {problem}", file=sys.stderr)
        return 2
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"rubric_judge: answers at http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if not words:
            threading.Event().wait()
        # Ctrl-C reaches the command too, which ends its runs in its own time and may still ask for verdicts.
        with subprocess.Popen(words) as command:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda number, frame: command.terminate())
            return command.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
