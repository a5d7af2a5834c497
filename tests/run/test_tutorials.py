"""The programs of docs/programs, DSPy's tutorials: they are read, sampled and scored as docs/stages.md types them."""

import json
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.cli.configs import train_configs
from mmrl.cli.overrides import read_line
from mmrl.run.check import check

PROGRAMS = Path(__file__).parents[2] / "docs" / "programs"
TUTORIALS = {
    "router": ("Router", "text", {"classify.predict"}),
    "hops": ("Hops", "claim", {"query.predict", "notes.predict"}),
}


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_evaluated_and_may_be_trained(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PROGRAMS))
    program, field, modules = TUTORIALS[name]
    words = ["task=dspy", f"task.program={name}:{program}", f"task.metric={name}:metric", f"task.inputs=[{field}]"]
    words += ["hardware=cpu", f"task.data.dev={name}:devset"]
    for config in train_configs(
        read_line(["-m", "algo=miprov2,mmgrpo", "model.path=tiny_prompts", f"task.data.train={name}:trainset", *words])
    ):
        assert not check(config)
    small = ["task.max_tokens=48", "task.max_context=2048", "eval.items=3", "run.dir=run"]
    assert main(["eval", "policy=tiny_prompts", *words, *small]) == 0
    items = [json.loads(line) for line in next(Path("run/eval").glob("*.jsonl")).read_text().splitlines()]
    assert len(items) == 3
    assert all({key.partition("/")[0] for key in item["modules"]} == modules for item in items)
