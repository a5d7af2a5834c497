"""One file per command: what `mmrl train`, `eval`, `compare`, `plan` and `credit` do, top to bottom."""
