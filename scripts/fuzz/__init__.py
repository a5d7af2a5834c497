"""Fuzzing: seeded generators of bad input, and the properties that every input must keep."""
