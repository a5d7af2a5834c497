"""The update: one objective over the sampled tokens, on top of TRL."""
