"""`mmrl plan`: what a run will do and cost, before any weights are loaded. Arithmetic, checked against runs."""
