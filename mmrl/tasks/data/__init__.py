"""Data sets and corpora: official record layouts, files, hub data sets, passages."""
