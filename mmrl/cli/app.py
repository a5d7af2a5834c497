"""The Typer application that every command is declared on, and what their declarations share."""

from __future__ import annotations

from typing import Annotated

import typer

# Typer would report an unknown option at once and alone; passed on, it is named together with all other mistakes.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
HYDRA_FLAGS = """\b
Flags:
  -m                   a sweep: a key takes several values, one run for every combination
  --config-dir FOLDER  configs of your own, before conf/ here and the shipped ones
  --cfg job            print the composed config and stop"""
JsonFlag = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]

# Errors and help are plain text: rich would read `run.report_to=[wandb]` as markup.
app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
