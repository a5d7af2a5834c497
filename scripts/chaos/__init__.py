"""Runs killed, starved of disk or damaged on purpose, continued, and compared with undisturbed ones."""
