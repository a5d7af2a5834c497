"""`python -m mmrl.cli.worker`: one process of a run of several, started by `stages.launch` with its job in MMRL_JOB."""

from __future__ import annotations

import json
import os
import sys

from mmrl.cli import print_error
from mmrl.errors import ConfigError, MmrlError


def work() -> int:
    """Run the job. Returns the exit code."""
    from mmrl.run import train as run
    from mmrl.run.launch import JOB

    try:
        if JOB not in os.environ:
            raise ConfigError(f"{JOB}: missing; `mmrl train` starts this")
        return run.work(json.loads(os.environ.pop(JOB)))
    except MmrlError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            print(f"process {rank}:", file=sys.stderr)
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(work())
