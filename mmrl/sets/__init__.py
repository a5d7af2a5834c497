"""Sets of runs: a paper's table or a comparison, from its file to its page."""
