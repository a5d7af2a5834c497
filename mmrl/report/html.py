"""HTML pages: `report.html` of a run, and the parts that all pages share.

No network; numbers and figures without script, on a phone and in the dark. Markup is in `templates/`, rendered by
Jinja with autoescape: what comes from a config, a model or a data set cannot become markup. The scripts, of the rollout
browser and of the values under the pointer, are named by their digests in the page's policy, so no other one runs.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from mmrl.errors import without_codes
from mmrl.models.load import local_path
from mmrl.report import browser
from mmrl.report.charts import DARK_CSS, evaluation_curve, lines_over_steps, reward_curve
from mmrl.report.items import item_rows, run_facts, score_rows
from mmrl.report.overview import Overview, damage_named
from mmrl.report.stats import RISING, ROUNDING, duration, fixed, learning, module_facts, series, signed
from mmrl.report.tables import before_after_rows, interval, module_rows
from mmrl.report.text import clean
from mmrl.report.trees import read_tokenizer
from mmrl.report.trials import prompts_text
from mmrl.secrets import hide
from mmrl.store.rundir import RunDir
from mmrl.system.files import atomic_write
from mmrl.system.objects import display_name

ITEMS = 200
"""Items shown of an evaluation."""
MODULE_LABELS = {
    "reward": "reward of the module's calls",
    "penalty": "module penalty",
    "format_rate": "share of completions that parse",
    "entropy": "entropy, nats per token",
    "surprise": "entropy estimate, nats per token",
    "length": "completion length, tokens",
    "kl": "KL to the reference, nats per token",
    "finish_length_share": "share cut at the length limit",
    "teacher_gap": "teacher − policy, nats per token",
}
HEALTH = {
    "credit/zero_variance_share": "groups with equal rewards, share",
    "train/kl": "KL to the reference, nats per token",
    "train/entropy": "entropy, nats per token",
    "train/grad_norm": "gradient norm",
    "train/clip_share": "clipped tokens, share",
    "train/logprob_gap_mean": "trainer − sampler, nats per token",
    "rollouts/failed_share": "failed rollouts, share",
}
TIMES = ("generate", "retrieve", "credit", "update", "overhead")


def write_report(overview: Overview) -> Path:
    """Write `report.html` into the run directory; returns its path."""
    run, training = overview.run, overview.training
    folders = [*sorted(run.checkpoints.glob("checkpoint-*")), Path(local_path(str(overview.get("model.path", ""))))]
    damaged: list[str] = []
    blocks = browser.blocks(overview, read_tokenizer(folders), damaged)
    curves, module_curves = _curves(overview), _module_curves(overview)
    # Means over modules, which have a chart by modules.
    by_module = {"train/entropy": {"entropy", "surprise"}, "train/kl": {"kl"}}
    measured = module_facts(training)
    monitors = {label: {key: key} for key, label in HEALTH.items() if by_module.get(key, set()).isdisjoint(measured)}
    health = _changing(overview, monitors)
    needed = {"charts.js": any([*curves.values(), *module_curves.values(), *health.values()]), "browser.js": blocks}
    facts = {name: fact for name, fact in overview.environment.items() if name != "config"}  # it has its own section
    page = rendered(
        "run.html",
        [name for name, where in needed.items() if where],
        blocks=blocks,
        all_blocks=len(browser.step_files(overview)),
        overview=overview,
        title=overview.name,
        facts=" · ".join(run_facts(overview)),
        differences=before_after_rows(overview.differences),
        rising={*RISING, overview.main_metric},
        evaluations=overview.evaluations,
        scores=list(_scores(overview)) if overview.evaluates else [],
        curves=curves,
        window=overview.window,
        module_curves=module_curves,
        modules=module_rows(training, measured) if overview.modules else [],
        health=health,
        prompts=prompts_text(run.path),
        damaged=damaged,
        newest=max(run.journal_steps(), default=0),
        times=_times(overview),
        command=clean(shlex.join(map(str, overview.environment.get("command", [])))),
        config=yaml.safe_dump(dict(overview.config), sort_keys=False, allow_unicode=True),
        environment=yaml.safe_dump(facts, sort_keys=False, allow_unicode=True),
    )
    atomic_write(run.report_path, page)
    return run.report_path


def try_report(overview: Overview) -> str:
    """Write the report; returns what went wrong, if anything did."""
    try:
        write_report(overview)
    except OSError:
        raise  # a full disk is no drawing problem
    except Exception as error:  # the numbers are safe: a drawing problem must not end the run or lose the summary
        return f"report not written ({type(error).__name__}: {error}); try again: mmrl report {overview.run.typed}"
    return ""


def report_run(path: Path | str) -> Path:
    """Write (again) the report of the run at `path`, finished or not.

    Raises:
        CheckpointError: not a run.
    """
    run = RunDir.read(path)
    with damage_named(path):
        return write_report(Overview.from_run(run))


@cache
def templates() -> Environment:
    """Return the environment of `templates/`; in pages all text is escaped."""
    environment = Environment(
        loader=PackageLoader("mmrl.report"),
        autoescape=select_autoescape(("html",)),
        # A name that a template misspells must fail in a test, not leave a gap in a page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"fixed": fixed, "signed": signed, "interval": interval}
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|")  # of a Markdown table
    return environment


def rendered(template: str, scripts: Sequence[str] = (), **values: object) -> bytes:
    """Render a page of `templates/`, as UTF-8.

    Args:
        scripts: files there that run in it.
    """
    sources = [PackageLoader("mmrl.report").get_source(templates(), name)[0] for name in scripts]
    by_digest = {base64.b64encode(hashlib.sha256(source.encode()).digest()).decode(): source for source in sources}
    page = templates().get_template(template).render(dark_css=DARK_CSS, scripts=by_digest, **values)
    # A model may have written a lone surrogate, which UTF-8 cannot hold.
    return hide(without_codes(display_name(page))).encode("utf-8", "replace")


# --- parts of a run's page


def _scores(overview: Overview) -> Iterator[dict[str, object]]:
    """Yield scores of an `mmrl eval` with their intervals, and the items with the lowest ones."""
    for split, steps in overview.items.items():
        for items in filter(None, steps.values()):
            title, rows = item_rows(items, ITEMS)
            metrics = overview.summary.get("metrics") or {}
            yield {"split": split, "means": score_rows(items, metrics), "title": title, "items": rows}


def _curves(overview: Overview) -> dict[str, str]:
    offered = overview.metric_names(overview.split)
    names = dict.fromkeys([overview.main_metric, "em", "f1", "accuracy", "reward"])
    selected = [name for name in names if name is not None and name in offered][:4]
    training = f"{learning(overview.training)[0].capitalize()} in training"
    evaluation = f"Evaluation on {overview.split} (band: 95 % interval of {''.join(selected[:1])})"
    curve = evaluation_curve(overview.history, overview.split, selected)
    return {training: reward_curve(overview.training), evaluation: curve}


def _module_curves(overview: Overview) -> dict[str, str]:
    facts = [fact for fact in module_facts(overview.training) if fact not in ("calls", "attempts", "clip_share")]
    # The sampler's estimate of the entropy, where the trainer computes it, says the same.
    facts = [fact for fact in facts if fact != "surprise" or "entropy" not in facts]
    listed = [fact for fact in MODULE_LABELS if fact in facts]
    figures = {}
    for fact in [*listed, *sorted(set(facts) - set(listed))]:
        keys = {name: f"module/{name}/{fact}" for name in overview.modules}
        having = [name for name, key in keys.items() if len(series(overview.training, key)[1])]
        label = MODULE_LABELS.get(fact, fact.replace("_", " "))
        label += f" ({having[0]})" if len(having) == 1 < len(keys) else ""
        figures[label] = keys
    return _changing(overview, figures)


def _changing(overview: Overview, figures: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Draw the figures (label -> name of a line -> metric) in which a metric changed by more than rounding.

    A flat line tells nothing; its number is in the table.
    """
    drawn = {}
    for label, keys in figures.items():
        curves = [values for key in keys.values() if len(values := series(overview.training, key)[1]) > 1]
        if any(np.ptp(values) > max(1e-4 * abs(values).max(), ROUNDING) for values in curves):
            drawn[label[0].upper() + label[1:]] = lines_over_steps(overview.training, keys, label)
    return drawn


def _times(overview: Overview) -> list[list[str]]:
    _, steps = series(overview.training, "time/step")
    if not len(steps):
        return []
    rows = []
    for name in TIMES:
        _, values = series(overview.training, f"time/{name}")
        if len(values):
            rows.append([name, duration(median(values)), f"{sum(values) / max(sum(steps), 1e-12):.0%}"])
    return [*rows, ["step", duration(median(steps)), ""]]
