"""Each figure of `scripts.house` on a package of a few lines, made up so that the figure is known."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts import house
from scripts.house import Figure, figures, main
from scripts.house_tree import read
from scripts.house_walk import Place, Walk, climbs, layers


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write these files under `root`, with an empty `__init__` in every folder of the package."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        for folder in path.parents:
            if folder != root and root in folder.parents and name.startswith("mmrl/"):
                (folder / "__init__.py").touch()


def measured(root: Path, files: Mapping[str, str]) -> dict[str, Figure]:
    """The figures of these files by the first words of their names."""
    write(root, files)
    return {row.name.split(":")[0]: row for row in figures(root)}


def test_cycles_through_type_checking_and_through_lazy_imports_are_told_apart(tmp_path: Path) -> None:
    row = measured(
        tmp_path,
        {
            "mmrl/a.py": "from mmrl.sub import b\n",
            "mmrl/sub/b.py": """
                from typing import TYPE_CHECKING
                if TYPE_CHECKING:
                    from ..a import A
                def f():
                    import mmrl.c
            """,
            "mmrl/c.py": "from mmrl import a\n",
        },
    )["largest cycle"]
    assert row.now == (0, 2, 3)
    assert row.shown == ("cycle: mmrl.a, mmrl.sub.b", "cycle: mmrl.a, mmrl.c, mmrl.sub.b")
    assert row.met is False


def test_an_import_of_a_submodule_is_no_import_of_its_package(tmp_path: Path) -> None:
    rows = measured(
        tmp_path,
        {
            "mmrl/sub/b.py": "",
            "mmrl/sub/c.py": "from mmrl.sub import b\n",
            "mmrl/sub/__init__.py": "from .c import x\n",
        },
    )
    assert rows["largest cycle"].now == (0, 0, 0)


def test_modules_with_one_importer_count_importing_modules_not_imports(tmp_path: Path) -> None:
    row = measured(
        tmp_path,
        {
            "mmrl/one.py": "",
            "mmrl/two.py": "",
            "mmrl/none.py": "import mmrl.one\nfrom mmrl.one import x\nfrom mmrl import two\n",
            "mmrl/other.py": "def f():\n    from mmrl.two import y\n",
        },
    )["modules with one importer"]
    assert row.now == (1,)
    assert row.details == ("mmrl.one <- mmrl.none",)


def test_fan_out_counts_every_kind_of_import_once(tmp_path: Path) -> None:
    files = {
        "mmrl/stages/weights.py": "from mmrl import a\nimport mmrl.a\nimport os\ndef f():\n    from mmrl.b import g\n",
        "mmrl/a.py": "",
        "mmrl/b.py": "",
    }
    assert measured(tmp_path, files)["fan-out of the loop"].now == (2,)


def test_a_loop_that_is_nowhere_is_missed_and_named(tmp_path: Path) -> None:
    row = measured(tmp_path, {"mmrl/a.py": ""})["fan-out of the loop"]
    assert row.met is False
    assert "not there" in row.cells()[1]


def test_repeated_file_names_leave_init_out(tmp_path: Path) -> None:
    row = measured(tmp_path, {"mmrl/x/base.py": "", "mmrl/y/base.py": "", "mmrl/y/only.py": ""})["repeated file names"]
    assert row.now == (1,)
    assert row.shown == ("base.py: mmrl/x/base.py, mmrl/y/base.py",)


def test_comments_docstrings_any_and_words_are_counted_where_they_stand(tmp_path: Path) -> None:
    rows = measured(
        tmp_path,
        {
            "mmrl/a.py": '''
                """Any text, found here."""
                from typing import Any
                # a reason
                x: Any = "# no comment"  # nor this, Any
                found = [1]
                found_at = FoundTwice = 1

                def f():
                    """Two
                    lines."""
            ''',
        },
    )
    lines = 10
    assert rows["own-line comments, % of lines"].now == (100 * 1 / lines,)
    assert rows["docstrings, % of lines"].now == (100 * 3 / lines,)
    assert rows["`Any` per 1,000 lines"].now == (1000 * 2 / lines,)
    assert rows["`found` per 1,000 lines"].now == (1000 * 1 / lines,)
    assert rows["dialect per 1,000 lines"].now == (1000 * 4 / lines,)
    assert rows["own-line comments, % of lines"].met is True


def test_sizes_of_files_and_functions(tmp_path: Path) -> None:
    rows = measured(
        tmp_path,
        {"mmrl/a.py": "class A:\n    def f(self, a, *, b):\n        return (a,\n            b)\n", "mmrl/b.py": ""},
    )
    assert rows["files / lines"].now == (2, 4)
    assert rows["file lines p50 / p95 / max"].now == (0, 4, 4)
    assert rows["function lines p50 / p95 / max"].now == (3, 3, 3)
    assert rows["parameters p95 / max"].now == (2, 2)


def test_reading_grpo_follows_the_arithmetic_through_re_exports_and_leaves_the_config_out(tmp_path: Path) -> None:
    row = measured(
        tmp_path,
        {
            "mmrl/algorithms/grpo.py": """
                from mmrl.credit import compare
                from mmrl.config import Algo
                from mmrl import records
            """,
            "mmrl/credit/__init__.py": "from .groups import compare\nfrom .unused import other\n",
            "mmrl/credit/groups.py": "def compare(): ...\n",
            "mmrl/credit/unused.py": "def other(): ...\n",
            "mmrl/config.py": "class Algo: ...\n",
            "mmrl/records.py": "x = 1\n",
        },
    )["GRPO whole"]
    assert row.details == ("mmrl.algorithms.grpo", "mmrl.credit.groups")
    assert row.now == (2, 4)


TRIP = {
    "pyproject.toml": """
        [[tool.importlinter.contracts]]
        type = "layers"
        layers = ["mmrl.run", "mmrl.stage", "mmrl.low | mmrl.models"]
    """,
    "mmrl/run.py": """
        from mmrl import low
        from mmrl.models import load
        from mmrl.stage import Stage

        def train(config: RunConfig, command) -> int:
            from mmrl.low import settle
            ready = settle(config)
            load(ready.model, config.seed)
            for _ in ready.models:
                show(ready.name)
            stage = Stage(command, config=ready.model_copy())
            return again(config) + low.count(config)

        def show(name: str): ...

        def again(config: RunConfig):
            return train(config, ())
    """,
    "mmrl/low.py": """
        def settle(config: RunConfig) -> RunConfig: ...
        def count(config: RunConfig) -> int: ...
    """,
    "mmrl/models.py": """
        def load(model: ModelConfig, seed): return inner(model)
        def inner(model: ModelConfig): ...
    """,
    "mmrl/stage.py": """
        class Base:
            def helper(self, config): ...

        class Stage(Base):
            def __init__(self, command, config):
                self.settings = config
            def step(self):
                self.helper(self.settings)
    """,
}


def test_the_walk_follows_the_config_through_calls_classes_and_what_settles_it(tmp_path: Path) -> None:
    write(tmp_path, TRIP)
    walk = Walk(read(tmp_path, "mmrl"))
    start = walk.locate("mmrl.run", "train")
    assert isinstance(start, Place)
    walk.enter(start, "config")
    assert [f"{stay.module}:{stay.function}:{stay.parameter}" for stay in walk.stays] == [
        "mmrl.run:train:config",
        "mmrl.low:settle:config",
        "mmrl.models:load:model",  # a section: a stay, not followed
        "mmrl.stage:Stage.__init__:config",
        "mmrl.stage:Base.helper:config",
        "mmrl.run:again:config",
        "mmrl.low:count:config",
    ]
    assert climbs(walk.stays, layers(tmp_path)) == [
        "mmrl.models:load -> mmrl.stage:Stage.__init__",
        "mmrl.stage:Base.helper -> mmrl.run:again",
    ]
    assert {row.name: row.now for row in figures(tmp_path)}["the config's trip: stays / rooms / climbs"] == (7, 4, 2)


def test_tests_and_readme_are_counted_by_folder(tmp_path: Path) -> None:
    rows = measured(
        tmp_path,
        {
            "README.md": "x" * 9217,
            "tests/conftest.py": "",
            "tests/test_a.py": "",
            "tests/credit/__init__.py": "",
            "tests/credit/test_b.py": "",
            "tests/helpers/fakes.py": "",
        },
    )
    assert (rows["README bytes"].now, rows["README bytes"].met) == ((9217,), False)
    assert rows["test folders"].now == (1,)
    assert rows["test files directly in tests/"].now == (1,)
    assert rows["helper modules of the tests"].now == (1,)


def test_silenced_types_broad_excepts_and_lazy_imports_are_information(tmp_path: Path) -> None:
    text = """
        def f():
            import os
            try:
                x = 1  # type: ignore[misc]
            except (KeyError, Exception):
                pass
            except KeyError:
                pass
    """
    rows = measured(tmp_path, {"mmrl/a.py": text})
    for name in ("type", "broad except", "imports inside functions"):
        assert (rows[name].now, rows[name].met) == ((1,), None)


def test_only_check_turns_a_missed_target_into_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"mmrl/a.py": ""})
    written = tmp_path / "figures.json"
    assert main(["--root", str(tmp_path), "--json", str(written)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert json.loads(written.read_text())["files / lines"] == {
        "now": [1, 0],
        "sign": "≤",
        "limits": [175, 30000],
        "ok": True,
    }
    assert capsys.readouterr().out.startswith("figure ")


def test_every_place_that_is_measured_by_name_is_there() -> None:
    missing = [row.name for row in figures(house.TOP) if not row.now]
    assert not missing, f"moved: {missing}; name the new places at the top of scripts/house.py"
