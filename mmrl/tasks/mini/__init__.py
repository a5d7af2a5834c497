"""The embedded mini world: an invented world, its documents, and questions about it.

`names` draws words, `world` draws entities and facts and writes documents, `questions` asks about the facts. Nothing
in it is a real person, place or thing, so a model cannot know an answer without reading.
"""
