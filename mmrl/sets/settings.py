"""Settings of a set's runs: in which ones they may differ, in which ones they do, and which were typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl.config.base import flattened, literal
from mmrl.report.overview import Overview
from mmrl.report.tables import Rows

NOT_VARIANTS = (
    *("seed", "run.", "hardware.", "engine.", "plugins", "train.save_every", "train.keep", "start"),
    *("model.date", "model.selfcheck"),
)
"""Config paths that may differ between runs of one row: they do not change what is learned."""
VARYING = (*NOT_VARIANTS, "policy", "task.prompts", "model.")
"""Config paths in which the seeds of one cell may differ: these, and where weights and prompts lie."""
STARTED = (*NOT_VARIANTS, "model.path", "model.revision", "task.prompts")
"""The same of runs that start from others, which have their weights and prompts from there."""
PLACES = (
    *("run", "hardware", "task.corpus", "task.retriever.index", "task.retriever.url"),
    *("task.judge.url", "task.judge.concurrency", "task.external.url", "task.external.concurrency"),
)
"""Keys that say where a run finds what its set asks for; a set may leave them to be typed."""


def settings_of(overview: Overview, excluded: tuple[str, ...]) -> dict[str, object]:
    """Return config path -> value, without the paths that begin with a name in `excluded`.

    Endpoints stay in any case: which model answers is no matter of the machine.
    """
    return settings_in(overview.config, excluded)


def settings_in(config: Mapping[str, object], excluded: tuple[str, ...]) -> dict[str, object]:
    """Return the settings of a run's config, as `settings_of`."""
    settings = flattened(config).items()
    return {path: v for path, v in settings if path.startswith("engine.endpoint") or not path.startswith(excluded)}


def differing(overviews: Sequence[Overview], excluded: tuple[str, ...]) -> list[str]:
    """Return the config paths in which runs differ, without those that begin with a name in `excluded`."""
    settings = [settings_of(overview, excluded) for overview in overviews]
    paths = dict.fromkeys(path for values in settings for path in values)
    return [path for path in paths if len({repr(values.get(path)) for values in settings}) > 1]


def difference_rows(runs: Mapping[str, Overview]) -> Rows:
    """Return a line per setting in which the runs of several rows differ, besides the algorithm and its own keys."""
    excluded = STARTED if any(run.get("start") for run in runs.values()) else NOT_VARIANTS
    settings = {row: settings_of(run, excluded) for row, run in runs.items()}
    algos = {str(run.get("algo.name")) for run in runs.values()}
    rows = [["setting", *runs]]
    for path in differing([*runs.values()], (*excluded, "algo.name")):
        # A key that one algorithm has and another has not is part of what the algorithm is.
        if not path.startswith("algo.") or len(algos) == 1 or all(path in values for values in settings.values()):
            rows.append([path, *(literal(values[path]) if path in values else "-" for values in settings.values())])
    return rows


def seeds_text(seeds: Mapping[str, Sequence[int]], own: Sequence[int]) -> str:
    """Return the seeds of a set's rows, those of most rows first.

    Args:
        own: seeds that the set names, which are said where no row has them all; none: it names none.
    """
    rows: dict[str, list[str]] = {}
    for row, numbers in seeds.items():
        rows.setdefault(", ".join(map(str, sorted(set(numbers)))), []).append(row)
    (most, _), *others = sorted(rows.items(), key=lambda pair: -len(pair[1])) or [("", [])]
    typed = own and not any(set(own) <= set(numbers) for numbers in seeds.values())
    texts = [most, *(f"{numbers} of {', '.join(names)}" for numbers, names in others)]
    return "; ".join([*texts, *([f"the set's own are {', '.join(map(str, own))}"] if typed else [])])
