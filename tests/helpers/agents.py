"""Agents that know nothing of mmrl: an endpoint, a key, and a client of OpenAI's."""

from __future__ import annotations

import re
from functools import lru_cache

import httpx

from mmrl.tasks.metrics import f1
from mmrl.tasks.mini.examples import mini_corpus, mini_multihop
from mmrl.tasks.search_program import TEMPLATES, parse_answer, parse_queries

TRAIN = [
    {"id": example.id, **example.inputs, "answers": example.metadata["answers"]} for example in mini_multihop("train")
]
DEV = [{"id": example.id, **example.inputs, "answers": example.metadata["answers"]} for example in mini_multihop("dev")]


def right(record, result):
    """F1 of the answer with the best of the gold ones."""
    return max(f1(result["answer"], gold) for gold in record["answers"])


@lru_cache
def corpus():
    return [(words(f"{document.title} {document.text}"), document) for document in mini_corpus()]


def words(text):
    return frozenset(re.findall(r"\w+", text.lower()))


def search(query):
    """The document that shares most words with a query."""
    wanted = words(query)
    return max(corpus(), key=lambda entry: len(wanted & entry[0]))[1]


def asked(module, user):
    return [
        {"role": "system", "content": TEMPLATES[module]["system"].text},
        {"role": "user", "content": user},
    ]


async def planner_worker(example, base_url, api_key):
    """A planner splits the question, a worker answers from what was found."""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=600) as client:

        async def said(module, user):
            body = {
                "model": f"policy/{module}",
                "messages": asked({"planner": "rewriter"}.get(module, "answerer"), user),
            }
            reply = await client.post(f"{base_url}/chat/completions", json=body)
            reply.raise_for_status()
            return reply.json()["choices"][0]["message"]["content"]

        question = example["question"]
        queries = parse_queries(await said("planner", f"Question: {question}")) or [question]
        found = [search(query) for query in queries[:4]]
        listing = "\n".join(f"Document{i}: {d.title} | {d.text}" for i, d in enumerate(found))
        answer = parse_answer(await said("worker", f"Question: {question}\n{listing}\nNow answer: {question}"))
    return {"answer": answer}
