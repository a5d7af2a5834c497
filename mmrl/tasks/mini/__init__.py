"""The embedded mini world: people, films, cities and products invented by a seeded generator."""
