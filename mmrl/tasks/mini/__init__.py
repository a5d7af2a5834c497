"""The embedded mini world: an invented world, its documents, and questions about it, as files of `mmrl/assets/mini`.

Nothing in it is a real person, place or thing, so a model cannot know an answer without reading. The files are written
by `scripts/tiny_model/mini`, which says how the world is made and what its splits share.
"""
