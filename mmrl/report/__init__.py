"""What a run leaves behind for people: journal, tables, plots, HTML."""
