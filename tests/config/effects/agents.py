"""Agents of a user's, by function; as a script, one that is a command."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from typing import Any


def said(base_url: str, api_key: str, *words: str) -> str:
    body = {"model": "m", "messages": [{"role": "system", "content": word} for word in words]}
    headers = {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request, timeout=30))
    return str(answer["choices"][0]["message"]["content"])


def agent(example: Any, base_url: str, api_key: str) -> list[str]:
    return [said(base_url, api_key, "title"), said(base_url, api_key, str(example))]


def other_agent(example: Any, base_url: str, api_key: str) -> str:
    return said(base_url, api_key, "another")


def slow_agent(example: Any, base_url: str, api_key: str) -> str:
    said(base_url, api_key, "once")
    time.sleep(0.4)
    return said(base_url, api_key, "twice")


if __name__ == "__main__":
    said(os.environ["MMRL_BASE_URL"], os.environ["MMRL_API_KEY"], "of a command")
    print(json.dumps("OPENAI_API_KEY" in os.environ))
