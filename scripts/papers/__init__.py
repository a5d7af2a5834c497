"""The tables and figures of the three papers: sets with the printed values, the papers' claims and scales."""
