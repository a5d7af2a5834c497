"""`mmrl credit` without its command line: files in, table or JSON out."""

from __future__ import annotations

import gzip
import json

import pytest

from mmrl.cli import main
from mmrl.commands.credit import Source, credit_all, json_report, table
from mmrl.config import ALGO_SCHEMAS
from mmrl.errors import ConfigError, DataError
from mmrl.store.forest import dump_forest
from mmrl.store.journal import encode_step, load_rollouts
from mmrl.system.files import dumps
from tests.helpers import TOP
from tests.helpers.forests import Grow


def section(name, **options):
    return ALGO_SCHEMAS[name].model_validate({"name": name, **options})


def printed(forest, *algos, width=None):
    """The table."""
    return table(algos, forest, credit_all(algos, Source(forest), 0), width)


def credited(forest, *algos):
    """The JSON, read."""
    return json.loads(json_report(algos, forest, credit_all(algos, Source(forest), 0)))


@pytest.fixture
def forest():
    grow = Grow(("a", "b"))
    for branch, outcome in enumerate((1.0, 0.0, None)):
        grow.chain(f"q/{branch}", "ab", outcome, 2, error=None if outcome is not None else "tool", fork="a")
    return grow.forest


def test_json_of_one_algorithm(forest):
    algo = section("mhgpo_fof", group_size=2)
    found = credited(forest, algo)
    assert found["version"] == 1 and found["algo"] == "mhgpo_fof"
    assert [call["id"] for call in found["calls"]] == ["q/0#0", "q/0#1", "q/1#0", "q/1#1"]
    first = found["calls"][0]
    assert first["reward"] == 1.0 and first["parts"] == {"shared": 1.0, "penalty": 0.0}
    assert first["group_size"] == 2 and first["mean"] == 0.5 and first["std"] == pytest.approx(0.5**0.5)
    assert first["advantages"] == pytest.approx([0.707106] * 2, abs=5e-7)
    assert first["weights"] == pytest.approx([1 / 8] * 2)
    assert first["returns"] is None and first["filler_of"] is None
    assert first["raw_advantages"] is None and first["token_rewards"] is None
    assert [call["module"] for call in found["calls"]] == ["a", "b", "a", "b"]
    assert found["calls_without_entry"] == ["q/2#0", "q/2#1"]


def test_advantages_of_several_algorithms_stand_side_by_side_before_a_table_of_each(forest):
    algos = [section("mhgpo_fof", group_size=2), section("mhgpo_is", group_size=2)]
    beside, *rest = printed(forest, *algos).split("\n\n")
    assert [line.split() for line in beside.splitlines()[1:3]] == [
        ["call", "module", "mhgpo_fof", "mhgpo_is"],
        ["q/0#0", "a", "0.707106", "x2", "0.707106", "x2"],
    ]
    lines = "\n\n".join(rest).splitlines()
    assert [lines[0], lines[7]] == ["mhgpo_fof: 4 entries", "mhgpo_is: 4 entries"]
    for head, first in (lines[1:3], lines[8:10]):
        assert head.split()[-2:] == ["advantage", "weight"] and first.startswith("q/0#0") and "0.707106 x2" in first
    assert lines[-2:] == ["", "calls without an entry: q/2#0, q/2#1"]


def test_the_command_takes_several_algorithms_and_prints_json_alone(capsys):
    line = f"credit algo=grpo,grpo_mr,mt_grpo rollouts={TOP}/docs/forests/turns.json algo.eps=1e-4 --json"
    assert main(line.split()) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for one, expected in zip(json.loads(shown.out), (1.039959, 1.287064, 2.477159), strict=True):
        assert one["calls"][0]["advantages"] == pytest.approx([expected] * 3, abs=6e-7)


def test_what_several_algorithms_lack_is_said_with_their_names(forest):
    algos = [section("mhgpo_fof", group_size=2), section("ppo", beta=0.0), section("mappo", beta=0.1)]
    with pytest.raises(DataError) as caught:
        credited(forest, *algos)
    first, second = caught.value.problems
    assert first.startswith("algo=ppo: call 'q/0#0': values: missing")
    assert second.startswith("algo=mappo: call 'q/0#0': logprobs: missing")


def test_problems_with_the_forests_modules_are_config_errors(forest):
    algo = section("mhgpo_fof", train_modules=("answerer",))
    with pytest.raises(ConfigError, match=r"algo\.train_modules: got 'answerer'"):
        credited(forest, algo)


def test_reads_the_json_form_and_the_journal(forest, tmp_path):
    plain = json.dumps(dump_forest(forest)).encode()
    journal = "".join(dumps(line) + "\n" for line in encode_step(forest, ())).encode()
    files = {"forest.json": plain, "forest.json.gz": gzip.compress(plain), "windows.json": b"\xef\xbb\xbf" + plain}
    files |= {"step-000001.jsonl": journal, "step-000001.jsonl.gz": gzip.compress(journal)}
    algo = section("mhgpo_rr", group_size=2)
    expected = credited(forest, algo)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        assert credited(load_rollouts(tmp_path / name), algo) == expected, name


def test_texts_with_blanks_and_line_separators_of_unicode_stay_in_their_line(tmp_path):
    """A journal's lines end at line feeds only: JSON may hold the other separators as they are."""
    grow = Grow(("a",))
    for branch, said in enumerate(("two words", "a\u2028b\x85c")):
        grow.end(grow.call(f"q/{branch}", None, "a", text=said), float(branch))
    path = tmp_path / "step-000001.jsonl"
    lines = [json.dumps(json.loads(dumps(line)), ensure_ascii=False) for line in encode_step(grow.forest, ())]
    path.write_bytes("\r\n".join([*lines, " ", ""]).encode())
    assert [call.text for call in load_rollouts(path).calls.values()] == ["two words", "a\u2028b\x85c"]


def test_names_that_no_terminal_shows_are_escaped():
    grow = Grow(("a",))
    for name, outcome in (("\ud800/0", 1.0), ("größe\n\x1b[31m/1", 0.0), ("größe/2", None)):
        grow.chain(name, "a", outcome, error=None if outcome is not None else "tool")
    text = printed(grow.forest, section("grpo", group_size=2))
    assert [line.split("  ")[0] for line in text.splitlines()[2:4]] == ["\\xd800/0#0", "größe ⏎ \\x1b[31m/1#0"]
    assert text.splitlines()[4] == "calls without an entry: größe/2#0"
    text.encode()


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"rollouts: .*/file cannot be read \(No such file or directory\)$"),
        (b"\xff\xff", "not UTF-8"),
        (b"{}", r"/file: version: missing"),
        (gzip.compress(b'{"line": "call"}', mtime=0), "damaged journal"),
        (gzip.compress(b"{}", mtime=0)[:-4], r"damaged journal \(EOFError: "),
        (
            b'{"line": "forest", "step": 1}\n{"line": "prompt", "ids": [1',
            r"file:2: got b.*, expected one JSON object per",
        ),
        (DEEP, "file: "),
        (b'{"line": "head"}\n' + DEEP, r"file:2: got b'\[\[.*, expected one JSON object per line"),
    ],
)
def test_files_that_cannot_be_read(content, says, tmp_path):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=says):
        load_rollouts(tmp_path / "file")
    with pytest.raises(DataError, match=r"Is a directory\); a journal is a file in RUN_DIR/journal$"):
        load_rollouts(tmp_path)


@pytest.mark.parametrize(
    ("record", "change", "says"),
    [
        ("q/0#0", {"parent": "q/0#1"}, "call 'q/0#0': parent: a cycle (q/0#0 -> q/0#1)"),
        ("q/1", {"reward": [1.0]}, "rollout 'q/1': reward: got [1.0], input should be a valid number"),
    ],
)
def test_a_journal_that_was_changed_is_checked_like_a_file(record, change, says, forest, tmp_path):
    """What is checked: tests/store/test_forest.py."""
    lines = [line | change if line.get("id") == record else line for line in encode_step(forest, ())]
    path = tmp_path / "step-000001.jsonl"
    path.write_text("\n".join(dumps(line) for line in lines))
    with pytest.raises(DataError) as caught:
        load_rollouts(path)
    assert caught.value.problems[0].startswith(f"{path}: {says}")


def test_a_table_shows_what_a_critic_estimates_and_what_padding_repeats():
    grow = Grow(("a", "b"))
    grow.call("q/0", None, "a", 2, values=(0.25, 0.5))
    grow.end(grow.call("q/1", "q/0", "b", 1, values=(0.0,)), 1.0)
    grow.end(grow.call("q/2", None, "a", 0, values=()), 0.00025)
    ppo, mmgrpo = section("ppo", beta=0, whiten="none"), section("mmgrpo", filler="max", rollouts=2)
    alone = printed(grow.forest, ppo).splitlines()
    assert alone[1].split()[:4] == ["call", "module", "reward", "parts"]
    assert "0.75 0.5" in alone[2] and "1 x2" in alone[2] and "0.333333 x2" in alone[2]
    both = printed(grow.forest, ppo, mmgrpo).splitlines()
    assert sum(line.startswith("q/1") for line in both) == 4 and sum("(filler)" in line for line in both) == 1
    assert "0.00025" in both[-1]
    found = credited(grow.forest, ppo)["calls"][0]
    assert found["returns"] == [1.0, 1.0] and found["raw_advantages"] == [0.75, 0.5]
    assert found["token_rewards"] == [0.0, 0.0] and found["group"] is None and found["mean"] is None


def test_a_table_to_the_word():
    """Rewards 1 and -0: mean 0.5, deviation 1 / sqrt 2, A = 0.5 / 0.707108 on both modules' three tokens; mmGRPO halves
    its weight between the modules and fills the gap of `b` with a copy. No tokens show `-`.
    """
    grow = Grow(("a", "b"))
    grow.end(grow.call("q/1", grow.call("q/0", None, "a", 2), "b", 1), 1.0)
    grow.end(grow.call("q/2", None, "a", 0), -0.0)
    head = "call module reward parts group size mean std advantage weight"
    of_a, of_b = "2 0.5 0.707107", "2 1 0 0 0.25"
    of_grpo = [
        f"q/0 a 1 outcome=1 q {of_a} 0.707106 x2 0.333333 x2",
        f"q/1 b 1 outcome=1 q {of_a} 0.707106 0.333333",
        f"q/2 a 0 outcome=0 q {of_a} - -",
    ]
    of_mmgrpo = [
        f"q/0 a 1 outcome=1 q:a:0 {of_a} 0.707106 x2 0.25 x2",
        f"q/1 b 1 outcome=1 q:b:0 {of_b}",
        f"q/1 b 1 outcome=1 q:b:0 (filler) {of_b}",
        f"q/2 a 0 outcome=0 q:a:0 {of_a} - -",
    ]
    grpo, mmgrpo = section("grpo", group_size=2), section("mmgrpo", rollouts=2, filler="max")
    for algo, rows in ((grpo, of_grpo), (mmgrpo, of_mmgrpo)):
        title, *lines = printed(grow.forest, algo).splitlines()
        assert title == f"{algo.name}: {len(rows)} entries"
        assert [" ".join(line.split()) for line in lines] == [head, *rows]


def test_mini_batches_split_the_examples_in_order_and_weigh_each_by_itself():
    """Three examples in two mini-batches: q0 and q1, then q2 alone, each with weights that sum to 1."""
    grow = Grow(("a",))
    for example in range(3):
        for branch in range(2):
            grow.chain(f"q{example}/{branch}", "a", float(branch), tokens=2)
    weights = {}
    for count in (1, 2, 3):
        algo = section("grpo", group_size=2, minibatches=count)
        found = credited(grow.forest, algo)["calls"]
        weights[count] = [(entry["minibatch"], entry["weights"][0]) for entry in found]
    assert weights[1] == [(0, pytest.approx(1 / 12))] * 6
    assert weights[2] == [(0, pytest.approx(1 / 8))] * 4 + [(1, pytest.approx(1 / 4))] * 2
    assert weights[3] == [(batch, pytest.approx(1 / 4)) for batch in (0, 0, 1, 1, 2, 2)]
    text = printed(grow.forest, section("grpo", minibatches=2))
    assert text.splitlines()[1].split()[:3] == ["call", "module", "minibatch"]
    assert [line.split()[2] for line in text.splitlines()[2:]] == ["0", "0", "0", "0", "1", "1"]
    with pytest.raises(ConfigError, match=r"algo\.minibatches: got 4, expected at most 3, the number of examples"):
        printed(grow.forest, section("grpo", minibatches=4))


def test_a_table_wider_than_the_terminal_goes_on_below_with_its_calls(forest):
    algo = section("mhgpo_fof", group_size=2)
    wide = printed(forest, algo)
    assert printed(forest, algo, width=120) == wide
    narrow = printed(forest, algo, width=80).splitlines()
    assert [line.split() for line in narrow[1:3]] == [
        ["call", "module", "reward", "parts", "group", "size", "mean", "std"],
        ["q/0#0", "a", "1", "shared=1", "penalty=0", "q:a:0", "2", "0.5", "0.707107"],
    ]
    assert narrow[7:9] == ["call   advantage     weight", "q/0#0  0.707106 x2   0.125 x2"]
    assert narrow[-1] == "calls without an entry: q/2#0, q/2#1" and max(map(len, narrow)) <= 80


def test_a_page_has_every_call_under_every_algorithm(forest, tmp_path, errors_of):
    (tmp_path / "forest.json").write_text(json.dumps(dump_forest(forest)))
    line = ["credit", "algo=mhgpo_fof,grpo", f"rollouts={tmp_path / 'forest.json'}"]
    page, picture = tmp_path / "page.html", tmp_path / "page.svg"
    for file in (page, picture):
        assert main([*line, "algo.group_size=2", f"page={file}"]) == 0
    for text in (page.read_text(), picture.read_text()):
        assert all(
            text.count(f">{call} {forest.calls[call].module}") + text.count(f"└ {call} ") for call in forest.calls
        )
        # Two rollouts with rewards 1 and 0, two calls each; the third failed from outside and has no entry.
        assert text.count(">+0.71<") == 4 and text.count(">-0.71<") == 4 and text.count(">·<") == 4
    assert "grpo: 4 entries" in page.read_text() and "q/0#0 → q/0#1" in page.read_text()
    assert "page.html exists; name another file" in errors_of(*line, f"page={page}")
