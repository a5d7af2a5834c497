"""How the mini world is made: words, entities and facts, documents, questions, messages (`write` has the files)."""
