"""Making of the mini world: words, entities and facts, documents, questions, messages (`write` has the files)."""
