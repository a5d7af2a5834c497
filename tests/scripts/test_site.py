"""The site of the documentation: each page has its place, a link that leads nowhere fails, no other host is asked."""

import json
import re
import shutil

import pytest
import yaml

from scripts.site import NAMES, TOP, build, on_site


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, where functions of Python are named by a tag."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, name, node: name)


def test_every_page_has_its_place_in_the_navigation():
    nav = yaml.load((TOP / "mkdocs.yml").read_text(), Loader)["nav"]
    listed = [page for group in nav for entries in group.values() for entry in entries for page in entry.values()]
    pages = {path.name for path in (TOP / "docs").glob("*.md")} | set(NAMES.values())
    assert sorted(listed) == sorted(pages), "mkdocs.yml: each page once, in the group of its reader"


@pytest.mark.parametrize(
    ("folder", "text", "expected"),
    [
        ("", "[a](docs/metrics.md#rows) [b](SECURITY.md)", "[a](metrics.md#rows) [b](security.md)"),
        ("docs", "[a](../README.md#two) [b](metrics.md)", "[a](index.md#two) [b](metrics.md)"),
        ("docs", "[a](../conf/set/mini.yaml), [b](programs/router.py)", "a, [b](programs/router.py)"),
        ("", "![a](docs/figures/x.png) [b](https://x.org/a.md) [c](#here)", None),
    ],
)
def test_links_are_those_of_the_site(folder, text, expected):
    assert on_site(text, TOP / folder) == (expected or text.replace("docs/", ""))


def test_the_site_is_built_and_asks_no_other_host(tmp_path, capfd):
    pytest.importorskip("zensical", reason="the site's generator: pip install 'mmrl[docs]'")
    shutil.copy(TOP / "mkdocs.yml", tmp_path)
    assert build(tmp_path) == 0, capfd.readouterr()
    site = tmp_path / "build" / "site"
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}
    assert "architecture.html" in pages
    for name, page in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)|<link\b[^>]*\bhref="([^"]+)', page)
        assert not [source for found in loaded for source in found if "//" in source], name
        assert ('class="mermaid"' in page) == ('src="mermaid.js"' in page), name
    # from docstrings
    assert 'id="mmrl.compose"' in pages["reference.html"]
    assert "Return the config of a run of" in pages["reference.html"]
    found = json.loads((site / "search.json").read_text(encoding="utf-8"))
    titles = [re.sub("<.*?>", "", item["title"]) for item in found["items"]]
    assert "Samplers: FoF, RR, IS" in titles and not [i for i in found["items"] if i["location"].startswith("tables/")]
    assert "metric_weights" in re.split(found["config"]["separator"], "`task.metric_weights=[1,0.2]`")


@pytest.mark.parametrize("broken", ["[x](nowhere.md)", "[x](metrics.md#nowhere)", "::: mmrl.nowhere"])
def test_what_leads_nowhere_fails_the_build(broken, tmp_path, monkeypatch, capfd):
    pytest.importorskip("zensical", reason="the site's generator: pip install 'mmrl[docs]'")
    docs = tmp_path / "docs"
    docs.mkdir()
    page = docs / "page.md"
    page.write_text("# Page\n\n[x](metrics.md#metrics)\n")
    (docs / "metrics.md").write_text("# Metrics\n")
    (tmp_path / "mkdocs.yml").write_text(
        re.sub(r"^nav:.*?^(?=\w)", "", (TOP / "mkdocs.yml").read_text(), flags=re.M | re.S)
    )
    monkeypatch.setattr("scripts.site.TOP", tmp_path)
    monkeypatch.setattr("scripts.site.NAMES", {})
    assert build(tmp_path) == 0, capfd.readouterr()
    page.write_text(f"# Page\n\n{broken}\n")
    assert build(tmp_path) != 0, capfd.readouterr()
