"""Which decode loop serves a model: the own one where it can and agrees with the model, else Hugging Face's, aloud.

Between `TransformersEngine` and the two loops.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from mmrl.engines.embedded.architecture import why_not
from mmrl.engines.embedded.decode import OwnLoop
from mmrl.engines.embedded.decoder import Loop
from mmrl.engines.embedded.hf_loop import HFLoop
from mmrl.engines.embedded.rows import Row
from mmrl.errors import ConfigError

LOG = logging.getLogger("mmrl.engines")

CHECKED_TOKENS = 512
"""Longest part of the first prompt that the self-check forwards twice."""
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.3
"""Largest difference of two log-probabilities in the self-check: rounding only, float32 and half precision."""


def choose(
    model: torch.nn.Module, wanted: str, stored_tokens: int = 65536, adapters: Sequence[str] | None = None
) -> Loop:
    """The loop for `engine.loop` = auto | own | hf.

    Args:
        model: a causal LM.
        stored_tokens: most tokens of shared prefixes that the own loop keeps.
        adapters: names of the adapters that rows ask for; None: all rows run with whichever is active.

    Raises:
        ConfigError: the own loop was asked for and does not know the model.
    """
    own = wanted != "hf"
    reason = why_not(model) if own else None
    if reason is not None:
        if wanted == "own":
            raise ConfigError(f"engine.loop: got 'own', which cannot serve this model: {reason}; use auto or hf")
        LOG.warning("engine.loop=auto: the model's own forward generates (slower), since %s", reason)
        own = False
    if adapters is None:
        return CheckedLoop(model, stored_tokens) if own else HFLoop(model)
    loops: dict[str, Loop] = {}
    first: OwnLoop | None = None
    for name in sorted(adapters):
        if own:
            checked = CheckedLoop(model, stored_tokens, name, first)
            first = first or checked.own
            loops[name] = checked
        else:
            loops[name] = HFLoop(model, name)
    return AdapterLoop(loops)


class CheckedLoop:
    """The own loop, compared with the model's forward on the first prompt; on a difference, the model's own."""

    def __init__(
        self, model: torch.nn.Module, stored_tokens: int, adapter: str | None = None, base: OwnLoop | None = None
    ):
        self.model = model
        self.adapter = adapter
        self.own = OwnLoop(model, stored_tokens, adapter, base)
        self.loop: Loop = self.own
        self.checked = False

    @property
    def refills(self) -> bool:
        """See `Loop.refills`."""
        return self.loop.refills

    def start(self) -> None:
        """See `Loop.start`."""
        if self.loop is not self.own:  # not used any more, but another adapter's loop may share its weights
            self.own.weights.refresh()
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
                self.loop = HFLoop(self.model, self.adapter)
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
        for loop in (self.loop, HFLoop(self.model, self.adapter)):
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


class AdapterLoop:
    """Rows of several adapters in flight at once: one loop per adapter, each with its own cache, stepped in turn.

    Args:
        loops: by adapter name, sorted; every row names one of them.
    """

    def __init__(self, loops: dict[str, Loop]):
        self.loops = loops
        self._names: list[str] = []
        """Adapter of each row in flight. The rows of one adapter stand in the order that its loop has them in."""

    @property
    def refills(self) -> bool:
        """See `Loop.refills`."""
        return all(loop.refills for loop in self.loops.values())

    def start(self) -> None:
        """See `Loop.start`."""
        self._names = []
        for loop in self.loops.values():
            loop.start()

    def stop(self) -> None:
        """See `Loop.stop`."""
        self._names = []
        for loop in reversed(self.loops.values()):
            loop.stop()

    def forget(self) -> None:
        """See `Loop.forget`."""
        for loop in self.loops.values():
            loop.forget()

    def prefill(self, rows: Sequence[Row]) -> torch.Tensor:
        """See `Loop.prefill`."""
        names = [row.adapter or "" for row in rows]
        made = {
            name: self.loops[name].prefill([rows[index] for index in places])
            for name, places in self._by_adapter(names).items()
        }
        self._names += names
        return self._gather(names, made)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `Loop.step`."""
        made = {
            name: self.loops[name].step([tokens[index] for index in places])
            for name, places in self._by_adapter(self._names).items()
        }
        return self._gather(self._names, made)

    def keep(self, indices: Sequence[int]) -> list[int]:
        """See `Loop.keep`."""
        wanted = set(indices)
        order: list[int] = []
        for name, places in self._by_adapter(self._names).items():
            local = self.loops[name].keep([at for at, index in enumerate(places) if index in wanted])
            order += [places[at] for at in local]
        self._names = [self._names[index] for index in order]
        return order

    def _by_adapter(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Positions of the rows of each adapter that has any."""
        found = {name: [i for i, other in enumerate(names) if other == name] for name in self.loops}
        return {name: places for name, places in found.items() if places}

    def _gather(self, names: Sequence[str], made: dict[str, torch.Tensor]) -> torch.Tensor:
        first = next(iter(made.values()))
        logits = first.new_empty(len(names), first.shape[1])
        for name, places in self._by_adapter(names).items():
            logits[torch.tensor(places, device=first.device)] = made[name]
        return logits
