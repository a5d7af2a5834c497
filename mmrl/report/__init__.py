"""Files of a run for people: journal, tables, plots, HTML."""
