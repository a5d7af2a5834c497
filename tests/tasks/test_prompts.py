from typing import Any

import pytest

from mmrl.errors import ConfigError
from mmrl.tasks.prompts import load_prompts
from mmrl.tasks.search_program import TEMPLATES, SearchProgram
from tests.helpers.programs import saved


def problems(path):
    with pytest.raises(ConfigError) as caught:
        load_prompts(TEMPLATES, path)
    return caught.value.problems


def test_a_file_replaces_what_it_names(tmp_path):
    path = saved(
        tmp_path / "prompts.yaml",
        "rewriter:\n  user: 'Frage: {question} {json}'\nanswerer:\n  system: ''\n  document: '[{index}] {text}'\n",
    )
    prompts = SearchProgram(load_prompts(TEMPLATES, path), 5)
    assert prompts.rewriter("{x}")[1]["content"] == "Frage: {x} {json}"
    assert prompts.rewriter("Q")[0]["content"] == TEMPLATES["rewriter"]["system"].text
    documents: Any = [{"title": "T", "text": "body"}]
    answerer = prompts.answerer("Q", documents)
    assert [message["role"] for message in answerer] == ["user"]
    assert "[0] body" in answerer[0]["content"]
    assert "Document0: T | body" in prompts.reranker("Q", documents)[1]["content"]


def test_all_problems_at_once_each_with_its_place(tmp_path):
    path = saved(
        tmp_path / "prompts.yaml",
        """
rewritter: {user: "{question}"}
rewriter: {user: "no placeholder", sistem: "x"}
reranker: {user: "{question} {gold}", system: "{question.__class__} {gold}", document: "{text!r}"}
answerer: {user: "{question", system: 3}
""",
    )
    found = problems(path)
    assert len(found) == 7
    assert all(problem.startswith(f"task.prompts: {path}") for problem in found)
    text = "\n".join(found)
    for expected in (
        "did you mean 'rewriter'",
        "rewriter.user: misses {question}",
        "did you mean 'system'",
        "reranker.user: misses {documents}",
        "reranker.document: misses {text}",
        "answerer.user: misses {documents}, {question}",
        "answerer.system: got int, expected text",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("rewriter: [", "prompts.yaml:1: cannot be read: not YAML"),
        ("- a", "got list"),
        ("", "got NoneType"),
        ("rewriter: text", "rewriter: got str, expected role: text"),
        ("rewriter: {user: '{}'}", "misses {question}"),
    ],
)
def test_malformed_files(tmp_path, content, expected):
    found = problems(saved(tmp_path / "prompts.yaml", content))
    assert len(found) == 1
    assert expected in found[0]
    assert "\n" not in found[0]


def test_missing_file(tmp_path):
    assert "cannot be read: No such file" in problems(str(tmp_path / "none.yaml"))[0]
