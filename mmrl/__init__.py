"""mmrl: train language-model programs by reinforcement learning."""

__version__ = "0.1.0"
