"""`mmrl index build` and `mmrl serve-retriever`: build and serve index folders."""

from __future__ import annotations

from pathlib import Path

from mmrl.commands.serve import listen, read_token
from mmrl.config.retriever import BuildIndexArguments, ServeIndexArguments
from mmrl.errors import ConfigError, DataError, refuse
from mmrl.models.hub import encoder_problems
from mmrl.retrieval.index_folder import build_index, is_started, open_index, partial_of, read_info, spec_of
from mmrl.retrieval.select import index_problems, packages_missing, server_problems
from mmrl.retrieval.serving import make_app
from mmrl.retrieval.store import PassageStore
from mmrl.system.files import user_path
from mmrl.tasks.data.corpus import Corpus


def build(arguments: BuildIndexArguments) -> None:
    """Run `mmrl index build`."""
    section, folder = arguments.section(), user_path(arguments.index)
    # All settings are checked before anything is downloaded or read.
    problems = packages_missing(section)
    if folder.exists():
        problems.append(f"index: {folder} exists, and is left as it is; choose another folder or remove it yourself")
    if not problems and section.encodes:
        problems += encoder_problems("model", str(spec_of(section).settings["model"]))
    try:
        corpus = Corpus(arguments.corpus)
    except DataError as error:
        problems += error.problems
    refuse(f"mmrl index build: {problem}" for problem in problems)
    spec = spec_of(section)
    goes_on = f", continuing the build in {partial_of(folder)}" if is_started(folder) else ""
    # Prompts end in spaces: in quotes.
    settings = {n: repr(v) if isinstance(v, str) and v != v.strip() else v for n, v in spec.settings.items() if v != ""}
    text = ", ".join(f"{name} {value}" for name, value in settings.items())
    print(f"index: {spec.kind} ({text}) -> {folder}{goes_on}", flush=True)
    try:
        built = build_index(
            folder,
            spec,
            corpus.passages,
            sources=arguments.corpus,
            stamp=corpus.stamp(),
            **section.model_dump(include={"device", "batch_size"}),
        )
    except OSError as error:
        raise ConfigError(f"mmrl index build: cannot build {folder}: {error}; the same command goes on") from None
    if corpus.skipped:
        print("\n  ".join(["left out:", *corpus.skipped]))
    print(f"built in {built.build_seconds:.1f} s: {folder}")
    use = f"task.retriever.name={built.kind} task.retriever.index={folder}"
    print(f"use it: {use}, or mmrl serve-retriever index={folder}")


def serve(arguments: ServeIndexArguments) -> None:
    """Run `mmrl serve-retriever`."""
    refuse(server_problems("mmrl serve-retriever"))
    token = read_token(arguments)
    folder = user_path(arguments.index)
    facts = read_info(folder, "index")
    if problems := index_problems("index", facts):
        raise DataError(problems)
    try:
        passages = PassageStore(folder)
        retriever = open_index(folder, facts, passages, **arguments.model_dump(include={"device", "batch_size"}))
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"index: cannot open {folder}: {error}") from None
    served: dict[str, str | int] = {
        "kind": facts.kind,
        "documents": len(passages),
        "index": Path(arguments.index).name,
        "digest": facts.digest,
    }
    app = make_app(retriever, served, max_batch=arguments.max_batch, token=token)
    listen(app, arguments, "listening on {url}")
