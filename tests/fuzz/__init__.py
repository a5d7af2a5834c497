"""Fuzzing: strategies of bad input, and what every input must keep."""
