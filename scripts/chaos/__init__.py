"""Chaos: runs disturbed on purpose, and compared with undisturbed ones."""

import os

# Before anything that computes is imported: trials are forks, and threads do not survive a fork.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
os.environ.update({"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
