"""Faults on purpose: runs that are killed, starved of disk or damaged, continued, and compared with undisturbed ones."""
