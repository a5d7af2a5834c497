"""Teachers: `algo.distill`, which score what the policy has sampled; `algo.teachers`, which write themselves.

The latter are programs that make rollouts for mmGRPO beside the student, or a model that CCPO exchanges by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from mmrl.config.base import Section
from mmrl.config.endpoint import EndpointConfig

STUDENT = "student"
"""Name of the policy in training, among the teachers of mmGRPO."""
POLICY, INITIAL = "policy", "initial"
"""Teachers of `algo.distill` without a model of their own: the weights in training, and those the run began with."""


FIELD = re.compile(r"\{([^{}]+)\}")
"""Field of a record in a text of `algo.privileged`."""


def is_url(teacher: str) -> bool:
    """Return True if a teacher of `algo.distill` is a server."""
    return teacher.startswith(("http://", "https://"))


def scoring_problems(
    distill: Mapping[str, str] | None, privileged: Mapping[str, str] | None, temperature: float, kl: str
) -> list[str]:
    """Return the problems of `algo.distill*` and `algo.privileged` on their own, one sentence each."""
    pairs = (("distill", distill), ("privileged", privileged))
    problems = [f"{key}: got {{}}, expected at least one module" for key, named in pairs if named == {}]
    problems += [
        f"privileged.{module}: got '{text}', expected a field of the record, or a text with {{fields}}"
        for module, text in (privileged or {}).items()
        if not text.strip()
    ]
    problems += [
        f"privileged.{module}: got '{text}', in which a brace has no partner; expected fields as {{field}}, and "
        "no other braces"
        for module, text in (privileged or {}).items()
        if {"{", "}"} & set(FIELD.sub("", text))
    ]
    for module, teacher in (distill or {}).items():
        if not teacher:
            problems.append(f"distill.{module}: got '', expected {POLICY}, {INITIAL}, a policy or a URL")
        elif is_url(teacher) and kl == "exact":
            problems.append(
                f"distill_kl: got exact, and a server ({teacher}) gives no more than log-probabilities of single "
                "tokens; use sampled, or a teacher that is loaded here"
            )
        elif is_url(teacher) and temperature != 1:
            problems.append(
                f"temperature: got {temperature:g}, and a server ({teacher}) gives log-probabilities at temperature 1 "
                "alone; use 1, or a teacher that is loaded here"
            )
    return list(dict.fromkeys(problems))


class TeacherConfig(Section):
    """Teacher of mmGRPO: the task's program under another policy, which makes rollouts."""

    name: str = Field(min_length=1, description="`student` is the policy in training; any other name is a teacher")
    policy: str | None = Field(
        None, description="a run, checkpoint, adapter, folder or hub id; null: the student's weights"
    )
    endpoint: EndpointConfig | None = Field(None, description="a model behind an endpoint, in the place of weights")
    prompts: str | None = Field(None, description="prompts file, as task.prompts; null: the student's")
    rollouts: int | None = Field(None, ge=1, description="rollouts per example; null (for all): an equal share of R")

    @model_validator(mode="after")
    def _policy(self) -> Self:
        # A teacher has to differ from the student in something, else its rollouts are the student's under another name.
        keys = [key for key in ("policy", "endpoint", "prompts") if getattr(self, key) is not None]
        if self.name == STUDENT and keys:
            raise ValueError(f"got {' and '.join(keys)} for {STUDENT}, the policy in training; leave them out")
        if self.name != STUDENT and not keys:
            raise ValueError(
                f"got neither policy, endpoint nor prompts for '{self.name}'; set one, or name it {STUDENT}"
            )
        if "policy" in keys and "endpoint" in keys:
            raise ValueError(f"got a policy and an endpoint for '{self.name}'; leave one of the two out")
        return self
