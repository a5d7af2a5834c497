"""`mmrl doctor`: problems of a run before it trains, each with the setting to change.

A run is built as `mmrl train` builds it (`run.kinds`), in a folder that is removed; before a long run `mmrl train`
looks in the same way (`run.checkup`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from mmrl.config import RlRunConfig
from mmrl.report.doctor import Probe, as_object, find, report
from mmrl.run.build import build_task, check_model
from mmrl.run.checkup import examined
from mmrl.run.kinds import build_stage
from mmrl.run.launch import released
from mmrl.run.settle import settle
from mmrl.run.start import started
from mmrl.stages.step_log import StepLog
from mmrl.system.files import dumps, plain


def doctor(config: RlRunConfig, examples: int, *, as_json: bool) -> int:
    """Play a few examples of a checked run and print what is wrong.

    Writes nothing that stays, but the merged weights of a run with an adapter that this one starts from.

    Args:
        examples: training examples to play.

    Returns:
        1 where training would be useless, else 0.

    Raises:
        ConfigError: a model that cannot be had, or devices that are not here.
    """
    # A single process sees what each of several would.
    hardware = config.hardware
    single = {"processes": 1, "nodes": 1, "sharding": "none", "cpu_offload": False, "ray": None}
    single |= {"rollout_devices": min(1, hardware.rollout_devices)}
    config = settle(started(config).model_copy(update={"hardware": hardware.model_copy(update=single)})).config
    check_model(config)
    probe = _probe(config, examples)
    findings = find(probe)
    if as_json:
        print(dumps(as_object(probe, findings), indent=1))
    else:
        several = hardware.processes * hardware.nodes
        note = f"\n(on one process; the run has {several})" if several > 1 else ""
        print(report(probe, findings) + note)
    return int(any(finding.useless for finding in findings))


def _probe(config: RlRunConfig, examples: int) -> Probe:
    from mmrl.report.progress import Progress
    from mmrl.report.trackers import Trackers
    from mmrl.stages.rl import RlStage
    from mmrl.store.rundir import RunDir
    from mmrl.system.stop import stoppable

    task = build_task(config.task, config.seed)
    stored = plain(config.model_dump(mode="json"))
    with (
        tempfile.TemporaryDirectory(prefix="mmrl-doctor-", ignore_cleanup_errors=True) as folder,
        RunDir.create(Path(folder) / "run", stored, ["mmrl", "doctor"]) as rundir,
        Progress(total=1, title="doctor", live=False, console=Console(quiet=True)) as progress,
        stoppable() as stop,
        released(task),
    ):
        log = StepLog(rundir=rundir, progress=progress, trackers=Trackers({}), stop=stop)
        stage = build_stage(config, task, log)
        assert isinstance(stage, RlStage)
        try:
            return examined(stage, examples)
        finally:
            stage.close()
