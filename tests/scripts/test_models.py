"""docs/models.md: the table of templates is what its command writes; that of architectures names all of them."""

import re

from scripts.docs import BEGIN, END
from scripts.models.__main__ import PAGE, template_table
from scripts.models.architectures import BEYOND, architectures
from scripts.models.known import REFUSED


def part(name):
    """A generated part of the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN.format("models", name))[2].partition(END)[0].strip()


def test_the_table_of_templates_is_up_to_date():
    assert part("templates") == template_table(), "run: python -m scripts.models templates"


def test_the_table_of_architectures_names_each_once_and_those_that_are_refused_apart():
    served, refused = (set(re.findall("`([^`]+)`", half)) for half in part("architectures").split("| refused |"))
    assert served | refused == {*architectures(), *BEYOND} and not served & refused
    assert {*REFUSED, *BEYOND} <= refused
