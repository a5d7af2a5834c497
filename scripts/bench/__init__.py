"""Benchmarks: each prints a table and writes one JSON with times, ratios, versions, threads and load."""
