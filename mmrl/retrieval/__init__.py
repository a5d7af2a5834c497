"""Retrieval: a corpus and queries in, scored documents out. No torch at import time; used by the tools of tasks."""
