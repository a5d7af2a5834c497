"""`mmrl serve`: a policy behind an OpenAI-compatible server, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from mmrl.config import EvalRunConfig
from mmrl.config.base import ServerArguments
from mmrl.config.rules import engine_name
from mmrl.errors import ConfigError, refuse
from mmrl.models.merged import require_undamaged
from mmrl.retrieval.select import server_problems
from mmrl.run.build import engine_problems, fixed_engine
from mmrl.run.settle import settle
from mmrl.secrets import token_of
from mmrl.store.policy import Policy, resolve
from mmrl.system.stop import stoppable

if TYPE_CHECKING:
    from fastapi import FastAPI

SETTINGS = ("policy", "model", "hardware", "engine")
"""Parts of an evaluation's config that say how a policy is loaded and sampled."""


class ServeArguments(ServerArguments):
    """Arguments of `mmrl serve` beside the config."""

    name: str = Field("policy", min_length=1, description="the model's name in requests")


def serve_policy(config: EvalRunConfig, arguments: ServeArguments) -> None:
    """Load a policy and serve it."""
    policy = _checked(config)
    token = read_token(arguments)
    # The model's own limit and not a task's; requests join a batch whenever they come.
    task = config.task.model_copy(update={"max_context": None})
    config = settle(config.model_copy(update={"task": task})).config
    if hasattr(config.engine, "schedule"):
        # Training waits for all programs so that batches repeat; here a request would wait for others that never
        # come.
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"schedule": "greedy"})})
    require_undamaged(policy, config.model)
    import torch

    from mmrl.serve.policy import ServedPolicy, make_app

    torch.set_num_threads(config.hardware.threads or 1)
    with (
        tempfile.TemporaryDirectory(prefix="mmrl-serve-") as folder,
        stoppable(),
        fixed_engine(config, policy, Path(folder), config.policy) as (engine, tokenizer),
        engine.prefix_cache_kept(),  # a chat's next turn begins with all that was said
    ):
        served = ServedPolicy(engine, tokenizer, list(policy.modules or ()), arguments.name)
        listen(make_app(served, token), arguments, snippets(served.models, arguments), grace_s=5)


def read_token(arguments: ServerArguments) -> str | None:
    """Return the token that every request to a server must bring.

    Raises:
        ConfigError: the environment variable that is to hold it does not.
    """
    return None if arguments.token_env is None else token_of(arguments.token_env, "token_env")


def listen(app: FastAPI, arguments: ServerArguments, announce: str, *, grace_s: int | None = None) -> None:
    """Serve until Ctrl-C.

    Args:
        announce: printed once it listens.

    Raises:
        ConfigError: it cannot listen there.
    """
    from mmrl.system.http_server import serve

    try:
        serve(app, arguments.host, arguments.port, announce=announce, grace_s=grace_s)
    except OSError as error:
        text = error.strerror or error
        raise ConfigError(f"host, port: cannot listen on host={arguments.host} port={arguments.port}: {text}") from None
    except KeyboardInterrupt:  # SIGTERM too: the server has answered what it could
        pass
    print("stopped", file=sys.stderr)


def _checked(config: EvalRunConfig) -> Policy:
    """Return the policy of a config that can be served.

    Raises:
        ConfigError: every problem, before anything is loaded.
    """
    problems = [
        f"{key}: has no effect on mmrl serve; its keys are host, port, token_env, name and those of "
        f"{', '.join(SETTINGS)}"
        for key in config.typed.keys
        if key.partition(".")[0] not in SETTINGS
    ]
    if "engine.schedule" in config.typed.keys:
        problems.append("engine.schedule: has no effect on mmrl serve, where requests join a batch whenever they come")
    name = engine_name(config)
    if name == "openai" or config.engine.endpoints:
        problems.append("engine: an endpoint is served already; take engine=transformers or engine=vllm_server")
    if config.hardware.processes * config.hardware.nodes != 1:
        problems.append(f"hardware: profile '{config.hardware.name}' has several processes, mmrl serve runs in one")
    problems += server_problems("mmrl serve")
    try:
        policy = resolve(config.policy)
    except ConfigError as error:
        # All mistakes are reported together, not one per start.
        raise ConfigError([*problems, *error.problems]) from None
    if name != "openai":
        problems += engine_problems(config, copied=policy.initial is not None, adapters=policy.folders.values())
    refuse(problems)
    return policy


def snippets(names: Sequence[str], arguments: ServeArguments) -> str:
    """Return the text that is printed when the server listens; `{url}` stands for its address."""
    model = names[0]
    key = "'none'" if arguments.token_env is None else f"os.environ['{arguments.token_env}']"
    header = "" if arguments.token_env is None else "import os\n  "
    return (
        f"listening on {{url}}/v1 (models: {', '.join(names)})\n\n"
        f"with openai:\n  {header}from openai import OpenAI\n"
        f"  client = OpenAI(base_url='{{url}}/v1', api_key={key})\n"
        f"  reply = client.chat.completions.create(model='{model}', messages=[{{'role': 'user', 'content': '…'}}])\n"
        f"  print(reply.choices[0].message.content)\n\n"
        f"with DSPy:\n  {header}import dspy\n"
        f"  dspy.configure(lm=dspy.LM('openai/{model}', api_base='{{url}}/v1', api_key={key}, cache=False))\n"
    )
