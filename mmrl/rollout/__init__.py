"""Running programs: contexts that record and replay, plans that fork."""
