"""`mmrl plan`: work and cost of a run, before any weights are loaded. Arithmetic, checked against runs."""
