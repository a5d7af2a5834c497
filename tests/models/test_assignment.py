"""Which module speaks with which weights, and what a config may say about it."""

from __future__ import annotations

from typing import Any

import pytest

from mmrl.config import AlgoConfig, LoraConfig, ModelConfig, ModuleWeights
from mmrl.config.algo import MappoConfig, MhgpoFofConfig, PpoConfig
from mmrl.models.assignment import ModuleAssignment, adapter_name

MODULES = ("rewriter", "reranker", "answerer")
FOF = MhgpoFofConfig(name="mhgpo_fof")


def assign(modules: Any = None, algo: AlgoConfig = FOF, lora: bool = True, program: Any = MODULES) -> ModuleAssignment:
    given = None if modules is None else {name: ModuleWeights(**fields) for name, fields in modules.items()}
    model = ModelConfig(name="m", path="tiny", lora=LoraConfig() if lora else None, modules=given)
    return ModuleAssignment(model=model, algo=algo, modules=tuple(program))


def frozen_fof(serving: bool = True) -> MhgpoFofConfig:
    return MhgpoFofConfig(name="mhgpo_fof", freeze_modules=("reranker",), frozen_serving=serving)


def test_one_shared_policy_is_the_default() -> None:
    found = assign()
    assert (found.served, found.adapters, found.frozen, found.describe(), found.record()) == (None, {}, (), {}, {})
    assert found.problems() == []


def test_every_module_gets_an_adapter_of_its_own_where_nothing_is_said() -> None:
    found = assign({})
    assert found.adapters == {name: name for name in MODULES}
    assert (found.rates, found.frozen_adapters, found.problems()) == ({}, frozenset(), [])
    assert adapter_name("hop.2/query") == "hop_2_query"


def test_modules_may_share_an_adapter_and_its_rate() -> None:
    found = assign({"rewriter": {"adapter": "search", "lr": 1e-4}, "reranker": {"adapter": "search"}})
    assert found.adapters == {"rewriter": "search", "reranker": "search", "answerer": "answerer"}
    assert found.rates == {"search": 1e-4}
    assert found.problems() == []


def test_a_frozen_module_is_out_of_the_loss_and_its_adapter_is_never_trained() -> None:
    found = assign({"reranker": {"frozen": True}})
    assert (found.frozen, found.frozen_adapters) == (("reranker",), {"reranker"})
    assert "reranker: reranker (frozen)" in found.describe()["weights"]


def test_an_adapter_is_frozen_only_when_all_its_modules_are() -> None:
    shared = {name: {"adapter": "search"} for name in ("rewriter", "reranker")}
    assert assign(shared, frozen_fof(serving=False)).frozen_adapters == frozenset()
    assert assign({}, frozen_fof(serving=False)).frozen_adapters == {"reranker"}


def test_frozen_serving_with_lora_is_a_second_adapter_that_stays_as_it_starts() -> None:
    found = assign(algo=frozen_fof())
    assert found.served == {"rewriter": "trained", "reranker": "initial", "answerer": "trained"}
    assert (found.frozen_adapters, found.copied, found.problems()) == ({"initial"}, False, [])


def test_frozen_serving_with_all_parameters_is_a_copy_of_the_initial_model() -> None:
    found = assign(algo=frozen_fof(), lora=False)
    assert found.served == {"rewriter": "trained", "reranker": "initial", "answerer": "trained"}
    assert (found.adapters, found.copied) == ({}, True)
    assert found.record() == {"modules": found.served, "base": "tiny"}
    assert assign(algo=frozen_fof(serving=False), lora=False).served is None


@pytest.mark.parametrize(
    ("modules", "options", "says"),
    [
        ({"rewritr": {}}, {}, r"model\.modules: got 'rewritr'.*did you mean 'rewriter'"),
        ({}, {"lora": False}, r"model\.modules: .*set model\.lora"),
        ({"rewriter": {"adapter": "critic"}}, {}, r"model\.modules\.rewriter\.adapter: got 'critic', expected letters"),
        ({"rewriter": {"adapter": "q_proj"}}, {}, r"got 'q_proj', expected letters"),
        ({"rewriter": {"adapter": "7"}}, {}, r"got '7', expected letters"),
        ({"rewriter": {"adapter": "a.b"}}, {}, r"got 'a\.b', expected letters"),
        (
            {"rewriter": {"adapter": "s", "lr": 1e-4}, "reranker": {"adapter": "s", "lr": 2e-4}},
            {},
            r"rewriter, reranker share the adapter 's' and differ in lr \(0\.0001, 0\.0002\)",
        ),
        ({"rewriter": {"frozen": True, "lr": 1e-4}}, {}, r"model\.modules\.rewriter\.lr: has no effect on a frozen"),
        (
            {"rewriter": {"frozen": True, "adapter": "answerer"}},
            {},
            r"model\.modules\.rewriter\.frozen: its adapter 'answerer' is trained by answerer",
        ),
        ({name: {"frozen": True} for name in MODULES}, {}, r"no module is left to train"),
        (
            {name: {"frozen": True} for name in ("rewriter", "answerer")},
            {"algo": frozen_fof(serving=False)},
            r"no module is left to train",
        ),
        ({"rewriter": {"frozen": True}}, {"algo": PpoConfig(name="ppo")}, r"rewriter\.frozen: the critic of ppo"),
        (None, {"algo": MhgpoFofConfig(name="mhgpo_fof", frozen_serving=True)}, r"set algo\.freeze_modules"),
        ({}, {"program": ("a.b", "a/b")}, r"adapters of a\.b, a/b would all be called 'a_b'"),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_named(modules: Any, options: dict[str, Any], says: str) -> None:
    import re

    assert re.search(says, "\n".join(assign(modules, **options).problems()))


def test_all_problems_come_at_once_and_mappo_may_freeze() -> None:
    assert len(assign({"x": {}, "rewriter": {"frozen": True, "lr": 1.0, "adapter": "a b"}}, lora=False).problems()) == 4
    assert assign({"rewriter": {"frozen": True}}, MappoConfig(name="mappo")).problems() == []
