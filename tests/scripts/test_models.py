"""docs/models.md: the table of templates is what its command writes; that of architectures counts all of them."""

import re

import pytest

from scripts.docs import BEGIN, END
from scripts.models.__main__ import PAGE, template_table
from scripts.models.architectures import BEYOND, architectures
from scripts.models.known import NEW, REFUSED


def part(name):
    """A generated part of the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN.format("models", name))[2].partition(END)[0].strip()


def test_the_table_of_templates_is_up_to_date():
    assert part("templates") == template_table(), "run: python -m scripts.models templates"


@pytest.mark.skipif(NEW, reason="the page's table is of the transformers of constraints.txt")
def test_the_table_of_architectures_names_what_differs_or_is_refused_and_counts_the_others():
    served, refused = (set(re.findall("`([^`]+)`", half)) for half in part("architectures").split("| refused |"))
    (others,) = re.findall(r"all (\d+) others", part("architectures"))
    every = {*architectures(), *BEYOND}
    assert served | refused < every and not served & refused
    assert int(others) == len(every - served - refused)
    assert {*REFUSED, *BEYOND} <= refused
