"""Every worked example of docs/algorithms.md through the command line: files in, the paper's numbers out."""

import json
import math
import subprocess
import sys

import pytest

from mmrl.cli import main

TOLERANCE = 6e-7
"""The examples are given with six decimals."""


class File:
    """A forest in its JSON form, written call by call."""

    def __init__(self, *modules):
        self.raw = {"version": 1, "modules": list(modules), "calls": [], "rollouts": []}
        self.counts = {}

    def call(self, call_id, parent, module, tokens=1, example="q", **fields):
        path = []
        above = {call["id"]: call for call in self.raw["calls"]}
        while parent is not None and (not path or path[-1]["parent"] is not None):
            path.append(above[path[-1]["parent"] if path else parent])
        call = {"id": call_id, "example": example, "parent": parent, "module": module, "completion_tokens": tokens}
        call |= {"invocation": sum(c["module"] == module for c in path), "turn": len(path), **fields}
        self.raw["calls"].append(call)
        return call_id

    def chain(self, name, modules, reward, example="q", **fields):
        parent = None
        for position, module in enumerate(modules):
            parent = self.call(f"{name}.{position}", parent, module, example=example)
        self.end(name, parent, reward, example=example, **fields)

    def end(self, name, leaf, reward, example="q", **fields):
        rollout = {"id": name, "example": example, "leaf": leaf, "reward": reward, "error": None, "fork": None}
        self.raw["rollouts"].append(rollout | fields)

    def set(self, call_id, **fields):
        next(call for call in self.raw["calls"] if call["id"] == call_id).update(fields)


@pytest.fixture
def credit(tmp_path, capsys):
    """Runs `mmrl credit … --json`; stdout must be JSON alone. Returns the calls (a list per algorithm for several)."""

    def run(file, algo, *options):
        path = tmp_path / "forest.json"
        path.write_text(json.dumps(file.raw))
        assert main(["credit", f"algo={algo}", f"rollouts={path}", "--json", *options]) == 0
        out = capsys.readouterr()
        assert out.err == ""
        found = json.loads(out.out)
        return [one["calls"] for one in found] if "," in algo else found["calls"]

    return run


def close(found, expected):
    assert found == pytest.approx(expected, abs=TOLERANCE)


def first(entries):
    """Call -> advantage of its first token, for entries that are one per call."""
    assert len({entry["id"] for entry in entries}) == len(entries)
    return {entry["id"]: entry["advantages"][0] for entry in entries}


# -- 5.1 mmGRPO --------------------------------------------------------------------------------------------------------


def mmgrpo_file():
    file = File("A", "B")
    file.chain("r0", "ABB", 1.0)
    file.chain("r1", "AB", 0.0)
    file.chain("r2", "ABBB", 0.5)
    file.chain("r3", "AB", None, error="parse")
    file.set("r3.1", ok=False, present_fields=1, expected_fields=2)
    return file


def groups(entries):
    found = {}
    for entry in entries:
        found.setdefault(entry["group"], []).append((entry["id"], entry["advantages"][0], entry["filler_of"]))
    return found


def test_mmgrpo_fill(credit):
    entries = credit(mmgrpo_file(), "mmgrpo", "algo.filler=max")
    found = groups(entries)
    assert [name for name, _, _ in found["q:A:0"]] == ["r0.0", "r1.0", "r2.0", "r0.0"]
    close([a for _, a, _ in found["q:A:0"]], [0.783186, -1.305310, -0.261062, 0.783186])
    members = {"q:B:0": "r0.1 r1.1 r2.1 r3.1", "q:B:1": "r0.2 r1.1 r2.2 r3.1", "q:B:2": "r0.2 r1.1 r2.3 r3.1"}
    for group, names in members.items():
        assert [name for name, _, _ in found[group]] == names.split()
        close([a for _, a, _ in found[group]], [1.161715, -0.387238, 0.387238, -1.161715])
    assert [filler is not None for _, _, filler in found["q:B:2"]] == [True, True, False, True]
    assert set(found) == {"q:A:0", *members}
    rewards = {group: [entry["reward"] for entry in entries if entry["group"] == group] for group in found}
    assert rewards == {"q:A:0": [1, 0, 0.5, 1], **{key: [1, 0, 0.5, -0.5] for key in members}}


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ([], -0.034894),
        (["algo.loss_mean=token"], -0.019847),
        (["algo.loss_mean=constant", "algo.loss_length=4"], -0.009924),
    ],
)
def test_weights_make_the_losses_of_one_group(credit, options, loss):
    """Token losses of a group of 2, 1 and 3 tokens, as given; weighed by what the command prints."""
    tokens = {"0": [-1.199807, -0.999793], "1": [0.452419], "2": [0.500749, 0.452419, 0.674929]}
    file = File("A")
    for name, losses in tokens.items():
        file.end(f"r{name}", file.call(name, None, "A", len(losses)), float(name == "0"))
    entries = credit(file, "mmgrpo", "algo.padding_mode=ragged", *options)
    close(math.fsum(w * x for e in entries for w, x in zip(e["weights"], tokens[e["id"]], strict=True)), loss)


def test_mmgrpo_variants(credit):
    file = mmgrpo_file()
    released = ["algo.failing_traces=trajectory", "algo.on_missing=skip_example", "algo.filler=max"]
    (a, *_) = groups(credit(file, "mmgrpo", *released)).items()
    rewards = [e["reward"] for e in credit(file, "mmgrpo", *released) if e["group"] == "q:A:0"]
    assert (a[0], [name for name, _, _ in a[1]], rewards) == (
        "q:A:0",
        ["r0.0", "r1.0", "r2.0", "r3.0"],
        [1, 0, 0.5, -0.5],
    )
    assert "q:A:0" not in groups(credit(file, "mmgrpo", "algo.on_missing=skip_example"))
    assert set(groups(credit(file, "mmgrpo", "algo.padding_mode=truncate"))) == {"q:A:0", "q:B:0"}
    diverse = groups(credit(file, "mmgrpo", "algo.group_size=3", "algo.filler=max"))
    assert [name for name, _, _ in diverse["q:A:0"]] == ["r0.0", "r2.0", "r1.0"]
    close([a for _, a, _ in diverse["q:A:0"]], [0.999800, 0, -0.999800])
    assert [name for name, _, _ in diverse["q:B:0"]] == ["r0.1", "r1.1", "r3.1"]
    close([a for _, a, _ in diverse["q:B:0"]], [1.090947, -0.218189, -0.872757])


# -- 5.2 MHGPO ---------------------------------------------------------------------------------------------------------

AGENTS = ("rewriter", "reranker", "answerer")


def fof_file():
    file = File(*AGENTS)
    for branch, reward in enumerate((1.0, 0.4, 0.0), start=1):
        file.chain(f"b{branch}", AGENTS, reward, fork="rewriter")
    file.set("b2.1", penalty=-0.5)
    file.set("b3.2", penalty=-1.0)
    return file


@pytest.mark.parametrize(
    ("propagate", "rewards", "expected"),
    [
        (
            "shared",
            [(1.0, 0.4, 0.0), (1.0, -0.1, 0.0), (1.0, 0.4, -1.0)],
            [(1.059624, -0.132453, -0.927171), (1.150791, -0.657595, -0.493196), (0.844440, 0.259828, -1.104268)],
        ),
        (
            "full",
            [(1.0, -0.1, -1.0), (1.0, -0.1, -1.0), (1.0, 0.4, -1.0)],
            [(1.031614, -0.066556, -0.965059), (1.031614, -0.066556, -0.965059), (0.844440, 0.259828, -1.104268)],
        ),
    ],
)
def test_fork_on_first(credit, propagate, rewards, expected):
    entries = credit(fof_file(), "mhgpo_fof", f"algo.propagate={propagate}")
    found, reward = first(entries), {entry["id"]: entry["reward"] for entry in entries}
    for agent, row in enumerate(expected):
        close([reward[f"b{branch}.{agent}"] for branch in (1, 2, 3)], rewards[agent])
        close([found[f"b{branch}.{agent}"] for branch in (1, 2, 3)], row)


def test_round_robin(credit):
    file = File(*AGENTS)
    forks = {"q0": (0, (0.0, 1.0)), "q1": (1, (0.6, 0.2)), "q2": (1, (1.0, 0.5))}
    for example, (fork, rewards) in forks.items():
        trunk = None
        for position in range(fork):
            trunk = file.call(f"{example}.{position}", trunk, AGENTS[position], 5, example=example)
        for branch, reward in enumerate(rewards):
            parent = trunk
            for position in range(fork, 3):
                parent = file.call(f"{example}.{position}.{branch}", parent, AGENTS[position], 5, example=example)
            file.end(f"{example}/{branch}", parent, reward, example=example, fork=AGENTS[fork])
    file.set("q1.0", penalty=-0.5)
    entries = {entry["id"]: entry for entry in credit(file, "mhgpo_rr", "algo.group_size=2")}
    close([entries["q1.0"]["reward"], entries["q2.0"]["reward"]], [-0.1, 0.75])
    close([entries["q1.0"]["parts"]["shared"], entries["q2.0"]["parts"]["shared"]], [0.4, 0.75])
    members = {}
    for name, entry in entries.items():
        members.setdefault(entry["group"], set()).add(name)
    pairs = [{f"q0.{p}.0", f"q0.{p}.1"} for p in range(3)]
    pairs += [{f"{q}.{p}.0", f"{q}.{p}.1"} for q in ("q1", "q2") for p in (1, 2)]
    assert sorted(map(sorted, members.values())) == sorted(map(sorted, [*pairs, {"q1.0", "q2.0"}]))
    close([entries["q1.0"]["advantages"][0], entries["q2.0"]["advantages"][0]], [-0.707106, 0.707106])
    assert entries["q1.0"]["group"] == entries["q2.0"]["group"] != entries["q0.0.0"]["group"]
    for name, size in (("q1.1", 0.707104), ("q1.2", 0.707104), ("q2.1", 0.707105), ("q2.2", 0.707105)):
        close([entries[f"{name}.{branch}"]["advantages"][0] for branch in (0, 1)], [size, -size])
    for position in range(3):
        close([entries[f"q0.{position}.{b}"]["advantages"][0] for b in (0, 1)], [-0.707106, 0.707106])
    close([entries["q1.0"]["weights"][0], entries["q0.0.0"]["weights"][0]], [0.022222, 0.011111])


@pytest.mark.parametrize(("aggregate", "shared"), [("mean", (0.75, 0.2)), ("max", (1.0, 0.4)), ("min", (0.5, 0.0))])
def test_fork_on_first_oversampled(credit, aggregate, shared):
    file = File(*AGENTS)
    for branch, rewards in enumerate(((1.0, 0.5), (0.0, 0.4))):
        parent = None
        for position in (0, 1):
            parent = file.call(f"b{branch}.{position}", parent, AGENTS[position])
        for leaf, reward in enumerate(rewards):
            file.end(f"{branch}/{leaf}", file.call(f"b{branch}.2.{leaf}", parent, "answerer"), reward, fork="rewriter")
    entries = {e["id"]: e for e in credit(file, "mhgpo_fof_os", f"algo.aggregate={aggregate}", "algo.group_size=2")}
    for position in (0, 1):
        close([entries[f"b{branch}.{position}"]["reward"] for branch in (0, 1)], shared)
    answers = [entries[f"b{branch}.2.{leaf}"]["advantages"][0] for branch in (0, 1) for leaf in (0, 1)]
    close(answers, [1.276441, 0.060783, -1.154875, -0.182349])


# -- 5.3 MAPPO ---------------------------------------------------------------------------------------------------------


def mappo_file():
    file = File("rewriter", "answerer")
    logs = {"values": [0.3, 0.2], "logprobs": [-1, -0.5], "ref_logprobs": [-1.2, -0.5]}
    parent = file.call("w", None, "rewriter", 2, **logs)
    logs = {"values": [0.5, 0.1, 0.4], "logprobs": [-0.2, -0.3, -0.9], "ref_logprobs": [-0.2, -0.8, -0.4]}
    file.end("r", file.call("a", parent, "answerer", 3, penalty=-1.0, **logs), 0.6)
    return file


def test_mappo(credit):
    writer, answerer = credit(mappo_file(), "mappo", "algo.beta=0.1")
    close(writer["token_rewards"], [-0.02, 0.6])
    close(answerer["token_rewards"], [0, -0.05, -0.35])
    close(writer["raw_advantages"], [0.28, 0.4])
    close(answerer["raw_advantages"], [-0.9, -0.5, -0.75])
    close(writer["returns"], [0.58, 0.6])
    close(answerer["returns"], [-0.4, -0.4, -0.35])
    close(writer["advantages"], [0.960436, 1.161224])
    close(answerer["advantages"], [-1.013979, -0.344686, -0.762994])
    writer, answerer = credit(mappo_file(), "mappo", "algo.beta=0.1", "algo.gae_lambda=0.95")
    close(writer["raw_advantages"], [0.26, 0.4])
    close(answerer["raw_advantages"], [-0.839375, -0.4625, -0.75])


# -- 5.4 GRPO, MT-GRPO -------------------------------------------------------------------------------------------------


def turns_file(rows):
    """One rollout per row: (intermediate rewards, outcome)."""
    file = File("agent")
    for number, (turns, outcome) in enumerate(rows):
        parent = None
        for turn, reward in enumerate((*turns, None)):
            last = reward is None
            fields = {} if last else {"turn_reward": reward, "observation_tokens": 2}
            parent = file.call(f"{number}.{turn}", parent, "agent", 2 if last else 3, **fields)
        file.end(f"r{number}", parent, outcome)
    return file


TWO_TURNS = [((0.7,), 1.7), ((0.2,), 0.1), ((), 1.4), ((0.0,), 0.3)]


def test_grpo_and_mt_grpo_side_by_side(credit):
    outcome, merged, turns = (
        first(entries) for entries in credit(turns_file(TWO_TURNS), "grpo,grpo_mr,mt_grpo", "algo.eps=1e-4")
    )
    close([outcome[f"{n}.0"] for n in range(4)], [1.039959, -0.976931, 0.661792, -0.724820])
    close([merged[f"{n}.0"] for n in range(4)], [1.287064, -0.792040, 0.297015, -0.792040])
    close([turns[f"{n}.0"] for n in range(4)], [2.477159, -1.052574, 0.297015, -1.405599])
    close([turns[f"{n}.1"] for n in (0, 1, 3)], [1.039959, -0.976931, -0.724820])


def test_mt_grpo_gives_sampled_tokens_alone_an_advantage(credit):
    entries = {entry["id"]: entry for entry in credit(turns_file(TWO_TURNS), "mt_grpo")}
    close(entries["0.0"]["advantages"], [2.477159] * 3)
    close(entries["0.1"]["advantages"], [1.039959] * 2)
    own = {name: entry["parts"]["own_advantage"] for name, entry in entries.items() if "turn" in entry["parts"]}
    close([own["0.0"], own["1.0"], own["3.0"]], [1.437200, -0.075642, -0.680779])


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("exclude", [[0.797624, 0.220473, 0.927081], [1.416198, 0.839047, 0.132440], [-2.213821, -1.059521]]),
        ("zero", [[0.505230, -0.071920, 0.927081], [1.708591, 1.131441, 0.132440], [-2.213821, -1.059521]]),
    ],
)
def test_mt_grpo_of_any_number_of_turns(credit, missing, expected):
    file = turns_file([((0.2, -0.1), 1.0), ((0.2, 0.1), 0.2), ((-0.3,), -1.0)])
    found = first(credit(file, "mt_grpo_variable", f"algo.missing_turn={missing}"))
    for number, row in enumerate(expected):
        close([found[f"{number}.{turn}"] for turn in range(len(row))], row)


# -- 5.5 PPO, MT-PPO ---------------------------------------------------------------------------------------------------

VALUES = ([0.4, 0.5, 0.1], [0.6, 0.3, 0.2], [0.8, 0.7])


def ppo_file(observed):
    file = File("agent")
    parent = None
    for turn, (values, reward) in enumerate(zip(VALUES, (0.0, 0.2, None), strict=True)):
        fields = {} if reward is None else {"turn_reward": reward, "observation_tokens": 1}
        seen = values if observed else values[:2]
        parent = file.call(f"{turn}", parent, "agent", 2, values=seen, **fields)
    file.end("r", parent, 1.0)
    return file


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["algo.obs=all"], [0.8, 0.7, 0.6, 0.9, 0.2, 0.3]),
        (["algo.obs=all", "algo.position=turn_end"], [0.8, 0.7, 0.6, 0.9, 0.2, 0.3]),
        ([], [0.8, 0.7, 0.6, 0.9, 0.2, 0.3]),
        (
            ["algo.gamma=0.9", "algo.gae_lambda=0.8", "algo.obs=all", "algo.position=turn_end"],
            [-0.026802, -0.106669, -0.025983, 0.422246, 0.046, 0.3],
        ),
        (["algo.gamma=0.9", "algo.gae_lambda=0.8"], [0.151504, 0.140977, 0.140246, 0.653120, 0.046, 0.3]),
    ],
)
def test_mt_ppo(credit, options, expected):
    entries = credit(ppo_file("algo.obs=all" in options), "mt_ppo", "algo.beta=0.0", *options)
    close([a for entry in entries for a in entry["raw_advantages"]], expected)


@pytest.mark.parametrize(
    ("options", "everything"),
    [
        (["algo.position=last_generated"], [0.8, 0.7, 1.1, 0.6, 0.9, 0.8, 0.2, 0.3]),
        (["algo.position=turn_end"], [0.8, 0.7, 1.1, 0.6, 0.9, 1.0, 0.2, 0.3]),
        (
            ["algo.position=turn_end", "algo.gamma=0.9", "algo.gae_lambda=0.8"],
            [-0.026802, -0.106669, 0.421293, -0.025983, 0.422246, 0.753120, 0.046, 0.3],
        ),
    ],
)
def test_mt_ppo_estimates_over_observations(credit, options, everything):
    """The command prints sampled tokens; whitened over all eight, they depend on the advantages of the other two."""
    mean = math.fsum(everything) / 8
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in everything) / 7)
    entries = credit(ppo_file(True), "mt_ppo", "algo.beta=0.0", "algo.obs=all", "algo.whiten=all", *options)
    sampled = [everything[t] for t in (0, 1, 3, 4, 6, 7)]
    found = [a for entry in entries for a in entry["advantages"]]
    assert found == pytest.approx([(a - mean) / std for a in sampled], abs=4e-6)  # six decimals, divided by std


def test_mt_ppo_returns_and_whitening(credit):
    entries = credit(ppo_file(False), "mt_ppo", "algo.beta=0.0")
    close([v for entry in entries for v in entry["returns"]], [1.2, 1.2, 1.2, 1.2, 1, 1])
    whitened = [0.777454, 0.418629, 0.059804, 1.136279, -1.375496, -1.016671]
    close([v for entry in entries for v in entry["advantages"]], whitened)


def test_ppo(credit):
    entries = credit(ppo_file(False), "ppo", "algo.beta=0.0")
    close([v for entry in entries for v in entry["raw_advantages"]], [0.6, 0.5, 0.4, 0.7, 0.2, 0.3])
    assert math.fsum(r for entry in entries for r in entry["token_rewards"]) == 1.0


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_loads_nothing_heavy(tmp_path):
    """How long it takes to start is measured by `make bench`; here, that none of what takes seconds is imported."""
    path = tmp_path / "forest.json"
    path.write_text(json.dumps(fof_file().raw))
    code = (
        "import sys; from mmrl.cli import main;"
        f"code = main(['credit', 'algo=mhgpo_fof,mhgpo_rr,mmgrpo', 'rollouts={path}', '--json']);"
        "heavy = {'torch', 'transformers', 'trl', 'dspy', 'datasets', 'numpy', 'httpx', 'openai', 'mmrl.tasks'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert [one["algo"] for one in json.loads(done.stdout)] == ["mhgpo_fof", "mhgpo_rr", "mmgrpo"]
