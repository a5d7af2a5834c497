"""Commands, one file each: `mmrl train`, `eval`, `compare`, `plan` and `credit`, top to bottom."""
