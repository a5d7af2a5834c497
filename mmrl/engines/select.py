"""Which decode loop serves a model: the own one where it can and agrees with the model, else Hugging Face's, aloud.

Between `TransformersEngine` and the two loops.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from mmrl.engines.architecture import why_not
from mmrl.engines.decode import OwnLoop
from mmrl.engines.decoder import Loop
from mmrl.engines.hf_loop import HFLoop
from mmrl.engines.rows import Row
from mmrl.errors import ConfigError

LOG = logging.getLogger("mmrl.engines")

CHECKED_TOKENS = 512
"""Longest part of the first prompt that the self-check forwards twice."""
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.3
"""Largest difference of two log-probabilities in the self-check: rounding only, float32 and half precision."""


def choose(model: torch.nn.Module, wanted: str, stored_tokens: int = 65536) -> Loop:
    """The loop for `engine.loop` = auto | own | hf.

    Args:
        model: a causal LM.
        stored_tokens: most tokens of shared prefixes that the own loop keeps.

    Raises:
        ConfigError: the own loop was asked for and does not know the model.
    """
    if wanted == "hf":
        return HFLoop(model)
    reason = why_not(model)
    if reason is None:
        return CheckedLoop(model, stored_tokens)
    if wanted == "own":
        raise ConfigError(f"engine.loop: got 'own', which cannot serve this model: {reason}; use auto or hf")
    LOG.warning("engine.loop=auto: the model's own forward generates (slower), since %s", reason)
    return HFLoop(model)


class CheckedLoop:
    """The own loop, compared with the model's forward on the first prompt; on a difference, the model's own."""

    def __init__(self, model: torch.nn.Module, stored_tokens: int):
        self.model = model
        self.loop: Loop = OwnLoop(model, stored_tokens)
        self.checked = False

    @property
    def refills(self) -> bool:
        """See `Loop.refills`."""
        return self.loop.refills

    def start(self) -> None:
        """See `Loop.start`."""
        self.loop.start()

    def stop(self) -> None:
        """See `Loop.stop`."""
        self.loop.stop()

    def forget(self) -> None:
        """See `Loop.forget`."""
        self.loop.forget()

    def prefill(self, rows: Sequence[Row]) -> torch.Tensor:
        """See `Loop.prefill`."""
        if not self.checked:
            difference, tolerance = self._compare(rows[0])
            self.checked = True
            if not difference <= tolerance:
                LOG.warning(
                    "engine.loop: the own loop differs from the model's forward by %.2g in a log-probability "
                    "(tolerance %.2g); the model's own forward generates (slower)",
                    difference,
                    tolerance,
                )
                self.loop.stop()
                self.loop = HFLoop(self.model)
                self.loop.start()
        return self.loop.prefill(rows)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `Loop.step`."""
        return self.loop.step(tokens)

    def keep(self, indices: Sequence[int]) -> list[int]:
        """See `Loop.keep`."""
        return self.loop.keep(indices)

    def _compare(self, row: Row) -> tuple[float, float]:
        """Largest difference in log-probability after the prompt and after one more token, and what is allowed."""
        ids = row.prompt_ids[:CHECKED_TOKENS]
        probe = Row(prompt_ids=ids, temperature=1.0, top_p=1.0, top_k=0, stop=(), limit=1, uniforms=row.uniforms)
        made = []
        for loop in (self.loop, HFLoop(self.model)):
            loop.start()
            try:
                made.append([loop.prefill([probe]), loop.step([ids[0]])])
            finally:
                loop.stop()
                loop.forget()
        self.loop.start()
        own, peer = (torch.cat(several).float().log_softmax(dim=-1) for several in made)
        if not torch.isfinite(peer).all():  # diverged weights: both fail, and the request says so
            return 0.0, 0.0
        return float((own - peer).abs().max()), TOLERANCE.get(made[1][0].dtype, HALF_TOLERANCE)
