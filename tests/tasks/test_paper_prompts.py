"""`task.prompts=paper`, and descriptions of a DSPy module's fields in a prompts file."""

import pytest

from mmrl.errors import ConfigError
from mmrl.tasks import TASKS
from tests.helpers.programs import default_config, make, problems, saved

TEXTS = {
    "hotpotqa": {
        ("rewriter", "system"): ("at most four simple sub-questions", "simple sub-questions"),
        ("reranker", "system"): ("Choose the documents", "(such as 0, 1, 2)"),
        ("reranker", "user"): ("such as 3, 0", "Output nothing else."),
        ("answerer", "system"): ("as briefly as possible", "as accurately as possible"),
    },
    "search_agent": {("agent", "user"): ("Think first, inside <think> and </think>.", "again each time")},
    "tool_agent": {("agent", "system"): ("does not help.", "answer from what you know")},
}
"""Task -> module and role that differ -> what the default says, what the set says instead."""
LIKE = {"2wiki": "hotpotqa", "musique": "hotpotqa"}


@pytest.mark.parametrize("task", [*TEXTS, *LIKE])
def test_the_papers_set_differs_where_behaviour_does_and_nowhere_else(task, tmp_path):
    plain, paper = (make(task, tmp_path, prompts=prompts).all_prompts.texts for prompts in (None, "paper"))
    expected = TEXTS[LIKE.get(task, task)]
    changed = {
        (module, role) for module in plain for role in plain[module] if plain[module][role] != paper[module][role]
    }
    assert changed == set(expected)
    for (module, role), (before, after) in expected.items():
        assert before in plain[module][role] and before not in paper[module][role] and after in paper[module][role]


@pytest.mark.parametrize("task", ["qa_direct", "banking77"])
def test_a_task_without_such_a_set_says_which_have_one(task):
    with pytest.raises(
        ConfigError, match=f"task.prompts: got 'paper', which task {task} does not have .2wiki, hotpotqa"
    ):
        TASKS[task](default_config(task, prompts="paper"), 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"craft": {}}, "got 'craft', expected one of craft_redacted_request.predict"),
        ({"respond_to_query": {"system": "x"}}, "got 'system', expected one of instructions"),
        ({"respond_to_query": {"instructions": 3}}, "respond_to_query.instructions: got int, expected text"),
    ],
)
def test_a_wrong_module_or_role_gets_one_line(content, says, tmp_path):
    told = problems("papillon", prompts=saved(tmp_path / "prompts.yaml", content))
    assert told.startswith("task.prompts: ") and says in told and "\n" not in told
