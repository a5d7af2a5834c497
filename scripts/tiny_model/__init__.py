"""Builds the tiny models that ship with mmrl: `python -m scripts.tiny_model.build`."""
