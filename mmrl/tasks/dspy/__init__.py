"""Tasks whose program is a `dspy.Module`: those of the mmGRPO paper, and a user's own."""
