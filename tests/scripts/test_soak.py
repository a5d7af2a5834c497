"""The soak: its bars on made-up samples."""

from __future__ import annotations

from scripts.soak import Sample, bars_of


def samples(growth: float = 0.0, files: float = 0.0) -> list[Sample]:
    return [
        {"step": float(n), "rss_mb": 500 + growth * n, "files": 20 + files * n, "threads": 3.0}
        for n in range(0, 1000, 5)
    ]


def missed(*, rss: float = 0.0, files: float = 0.0, slower: float = 1.0, journal: float = 0.0) -> list[str]:
    seconds = [0.1] * 900 + [0.1 * slower] * 100
    sizes = [int(1000 + journal * n) for n in range(1000)]
    return [bar.what for bar in bars_of(samples(rss, files), seconds, sizes, 1000) if bar.met is False]


def test_a_flat_run_meets_all_bars() -> None:
    assert missed() == []


def test_what_grows_is_named() -> None:
    assert missed(rss=0.1) == ["rss_mb, last tenth"]
    assert missed(files=0.01) == ["files, last tenth"]
    assert missed(slower=1.2) == ["s of a step, last 100"]
    assert missed(journal=1.0) == ["journal bytes a step, second half"]
