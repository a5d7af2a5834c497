"""The model card: what it says of the algorithm."""

from pathlib import Path

import pytest
import yaml

import mmrl
from mmrl.algorithms import ALGORITHMS
from mmrl.report.card import PAPERS, CardFacts, model_card
from mmrl.report.overview import Overview
from tests.helpers.runs import fake_run


def card(tmp_path, algorithm):
    run = fake_run(tmp_path / "run", steps=1)
    config = run.path / "config.yaml"
    content = yaml.safe_load(config.read_text())
    content["algo"]["name"] = algorithm
    config.write_text(yaml.safe_dump(content))
    return model_card(Overview.from_run(run), CardFacts(title="x", step=1, holds="All."))


@pytest.mark.parametrize(
    ("algorithm", "paper"),
    [
        ("grpo", "2402.03300"),
        ("ppo", "1707.06347"),
        ("mt_ppo", "2505.11821"),
        ("mappo", "2506.02718"),
        ("mhgpo_fof_os", "2506.02718"),
        ("mmgrpo", "2508.04660"),
        ("mine", None),  # of a plugin
        ("mmgrpo_of_mine", None),
        ("sft", None),
    ],
)
def test_a_card_names_the_paper_of_its_algorithm_and_no_other(algorithm, paper, tmp_path):
    text = card(tmp_path, algorithm)
    tags = yaml.safe_load(text.split("---")[1])["tags"]
    assert [tag for tag in tags if tag.startswith("arxiv:")] == ([f"arxiv:{paper}"] if paper else [])
    assert text.count("arxiv.org/abs/") == (1 if paper else 0)
    assert paper is None or f"`{algorithm}` ([arXiv {paper}](https://arxiv.org/abs/{paper}))" in text


def test_every_algorithm_of_mmrl_has_its_paper():
    shipped = {path.stem for path in (Path(mmrl.__file__).parent / "conf/algo").glob("*.yaml")}
    assert set(PAPERS) == shipped & set(ALGORITHMS)
