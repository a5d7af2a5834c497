import pytest
import yaml

from mmrl.cli import configs, main
from mmrl.cli.overrides import expand, read_line
from mmrl.errors import ConfigError
from mmrl.run.check import Checked
from mmrl.store.rundir import RunDir


def plays(score):
    """Stands for a training run whose main metric after training is `score(config)`."""

    def train(checked):
        config = checked.config
        with RunDir.create(config.run.dir, config.model_dump(mode="json"), config.typed.command) as run:
            compared = {"f1": {"before": 0.1, "after": score(config)}}
            run.write_summary({"main_metric": "f1", "comparison": compared, "split": "dev"})
        return run.path, 0

    return train


@pytest.fixture
def optuna():
    reason = "needs optuna and hydra-optuna-sweeper (pip install 'mmrl[optuna]')"
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason=reason)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmrl.sets.sweep.check_all", lambda configs: [Checked(config) for config in configs])
    return monkeypatch


def test_a_sweep_gives_its_sweeper_the_main_metric_and_prints_its_runs_side_by_side(quick, tmp_path, output_of):
    quick.setattr("mmrl.sets.sweep.begin", plays(lambda config: config.train.lr))
    given, through = [], configs.swept

    def watched(line, job):
        through(line, lambda build: given.append(job(build)) or given[-1])

    quick.setattr(configs, "swept", watched)
    printed = output_of("train", "-m", "train.lr=0.25,0.5")
    assert given == [0.25, 0.5]
    assert "mhgpo_rr train.lr=0.25" in printed and "mhgpo_rr train.lr=0.5" in printed
    assert "sweep: 2 of 2 runs finished" in printed
    # in folders of the usual names (Hydra's own is `multirun`), and nothing else is left behind
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {"hotpotqa", "multirun"}


def test_a_search_of_four_trials_goes_where_the_metric_is_best(optuna, quick, tmp_path, output_of):
    quick.setattr("mmrl.sets.sweep.begin", plays(lambda config: config.train.lr * config.train.batch_size))
    search = (
        "hydra/sweeper=optuna hydra.sweeper.n_trials=4 hydra.sweeper.sampler.seed=1 hydra.sweeper.direction=maximize "
        "train.lr=tag(log,interval(1e-6,1e-3)) train.batch_size=choice(2,4)"
    )
    printed = output_of("train", "-m", *search.split(), "seed=3", f"hydra.sweep.dir={tmp_path}/study")
    assert "sweep: 4 of 4 runs finished" in printed and "-- job 4: algo=mhgpo_rr task=hotpotqa seed=3" in printed
    found = yaml.safe_load((tmp_path / "study" / "optimization_results.yaml").read_text())
    runs = [RunDir.read(path.parent) for path in tmp_path.rglob("summary.json")]
    best = max(runs, key=lambda run: run.summary["comparison"]["f1"]["after"]).config["train"]
    assert len({run.config["train"]["lr"] for run in runs}) == 4
    assert found["best_value"] == pytest.approx(best["lr"] * best["batch_size"])
    assert found["best_params"] == {"++train.lr": best["lr"], "++train.batch_size": str(best["batch_size"])} or (
        found["best_params"]["++train.lr"] == best["lr"]
    )


def test_each_trial_of_a_search_is_checked_not_the_ends_of_its_ranges_alone(optuna, quick, tmp_path, capsys):
    begun = []
    quick.setattr("mmrl.sets.sweep.begin", plays(lambda config: begun.append(config.train.lr) or config.train.lr))

    def check_all(configs):
        if any(0.1 < config.train.lr < 0.2 for config in configs):
            raise ConfigError("train.lr: refused")
        return [Checked(config) for config in configs]

    quick.setattr("mmrl.sets.sweep.check_all", check_all)
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", f"hydra.sweep.dir={tmp_path}/study"]
    assert main(["train", "-m", *search, "train.lr=interval(0.1,0.2)"]) == 2
    assert "train.lr: refused" in capsys.readouterr().err and not begun


def test_a_search_in_which_every_trial_fails_says_so_and_is_no_traceback(optuna, quick, tmp_path, capsys):
    def fails(checked):
        raise ConfigError("model.path: no weights")

    quick.setattr("mmrl.sets.sweep.begin", fails)
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", f"hydra.sweep.dir={tmp_path}/study"]
    assert main(["train", "-m", *search, "train.lr=interval(0.1,0.2)"]) == 2
    printed = capsys.readouterr()
    assert "sweep: 0 of 2 runs finished" in printed.err and "No trials are completed" not in printed.err
    assert not list((tmp_path / "outputs").rglob("*_s0")), "no empty folders"


def test_what_a_search_may_try_is_validated_before_it_starts(quick, capsys):
    line = read_line(["-m", "hydra/sweeper=optuna", "train.lr=interval(0,1)", "seed=1"])
    lows_and_highs = [word for job in expand(line, []) for word in job if "lr" in word]
    assert lows_and_highs == ["++train.lr=0.0", "++train.lr=1.0"]
    line = read_line(["-m", "hydra/sweeper=optuna", "seed=range(1,4)", "train.lr=0.1"])
    assert [job[1] for job in expand(line, [])] == ["++seed=1", "++seed=3"]
    # a list that is not searched is still every job of the grid
    assert len(expand(read_line(["-m", "seed=1,2", "train.lr=0.1,0.2"]), [])) == 4


def own_sweep(folder, text):
    (folder / "conf/experiment").mkdir(parents=True, exist_ok=True)
    (folder / "conf/experiment/mine.yaml").write_text(f"# @package _global_\n{text}\ntrain: {{steps: 1}}\n")


GRID = "hydra: {mode: MULTIRUN, sweeper: {params: {algo.group_size: '2,3', ++seed: '4,5'}}}"


def test_a_sweep_in_a_file_is_counted_and_checked_as_a_typed_one(quick, tmp_path, capsys):
    own_sweep(tmp_path, GRID)
    begun = []

    def begin(checked):
        begun.append((checked.config.algo.group_size, checked.config.seed))
        if checked.config.algo.group_size == 3:
            raise ConfigError("model.path: no weights")
        return plays(lambda config: 0.5)(checked)

    quick.setattr("mmrl.sets.sweep.begin", begin)
    assert main(["train", "-m", "algo=grpo", "experiment=mine", "seed=7,8"]) == 2
    assert begun == [(2, 7), (2, 8), (3, 7), (3, 8)]
    assert "sweep: 2 of 4 runs finished" in capsys.readouterr().err
    own_sweep(tmp_path, GRID.replace("'2,3'", "'2,x'"))
    begun.clear()
    assert main(["train", "-m", "algo=grpo", "experiment=mine"]) == 2
    assert "algo.group_size: got 'x'" in capsys.readouterr().err and not begun


def test_a_job_that_a_launcher_loses_is_counted(quick, tmp_path, capsys):
    own_sweep(tmp_path, GRID)
    quick.setattr("mmrl.sets.sweep.begin", plays(lambda config: 0.5))
    through = configs.swept
    quick.setattr(configs, "swept", lambda line, job: through(line, lambda build: build().seed == 4 and job(build)))
    assert main(["train", "-m", "algo=grpo", "experiment=mine"]) == 1
    assert "sweep: 2 of 4 runs finished" in capsys.readouterr().err


def test_a_sweep_in_a_file_is_refused_where_a_run_is_trained_without_it(quick, tmp_path, errors_of, capsys):
    own_sweep(tmp_path, GRID)
    (tmp_path / "conf/experiment/other.yaml").write_text("# @package _global_\nseed: 3\n")
    for words in (["train"], ["compare"], ["train", "-m"]):
        told = errors_of(*words, "algo=grpo", "experiment=mine,other" if "-m" in words else "experiment=mine")
        assert (
            "hydra.sweeper.params: a file sets it, and it holds in a sweep of one experiment alone: mmrl train -m"
            in told
        )
    capsys.readouterr()
    for words in (
        ["plan", "algo=grpo"],
        ["train", "--cfg", "full", "algo=grpo"],
        ["eval", "policy=tiny", "--cfg", "job"],
    ):
        assert main([*words, "experiment=mine"]) == 0, capsys.readouterr().err
    assert "seed: 0" in capsys.readouterr().out, "the file's sweep is passed over"
    own_sweep(tmp_path, "hydra: {mode: MULTIRUN}")
    assert "error: hydra.mode: a file sets it" in errors_of("train", "experiment=mine")


def test_ranges_of_a_sweeper_that_a_file_chose_are_checked(optuna, quick, tmp_path, errors_of):
    own_sweep(
        tmp_path, "defaults: [override /hydra/sweeper: optuna]\nhydra: {sweeper: {params: {seed: 'range(-3,4)'}}}"
    )
    assert "seed: got -3" in errors_of("train", "-m", "experiment=mine")
