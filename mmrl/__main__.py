"""`python -m mmrl` is the `mmrl` command."""

import sys

from mmrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
