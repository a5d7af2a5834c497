"""Prompts of a program: default texts and demonstrations, replacement from a YAML file, rendering, and writing again.

A template is a text with named placeholders, `{question}`; all other braces are plain. What is filled in is not looked
at again, so braces in questions and documents are safe. Nothing is filled into demonstrations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, ClassVar, Protocol, runtime_checkable

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from mmrl.errors import ConfigError, DataError, refuse, unknown
from mmrl.records import EMPTY, Call
from mmrl.retrieval.words import first_words
from mmrl.system.conf import conf_dir
from mmrl.system.files import atomic_write, read_yaml, user_path
from mmrl.tasks.base import Passage, Program

PAPER = "paper"
"""`task.prompts=paper`: shipped texts, other than the defaults where the paper of a task asks for other behaviour."""
_LIKE = {"2wiki": "hotpotqa", "musique": "hotpotqa"}
"""Tasks with the program of another."""
DEMONSTRATIONS = "demonstrations"
"""Key of a module's demonstrations in a prompts file, beside its roles."""


@dataclass(frozen=True, slots=True)
class Template:
    """Default text and its placeholders."""

    text: str
    required: frozenset[str] = frozenset()
    """Placeholders that the text must have."""
    optional: frozenset[str] = frozenset()
    """Placeholders that it may have."""
    instructions: bool = False
    """True if the text tells its module what to do: the text that a prompt optimiser changes. The other roles
    say in what form questions, documents and replies are written, and stay."""

    def problems(self, where: str, text: str) -> list[str]:
        """Return the sentence for a text that misses placeholders and cannot take this one's place."""
        missing = [f"{{{name}}}" for name in sorted(self.required) if f"{{{name}}}" not in text]
        return [f"{where}: misses {', '.join(missing)}"] if missing else []


QUESTION = frozenset({"question"})
"""The placeholder of the text that asks."""


def document_template(text: str) -> Template:
    """Return the template of a retrieved document."""
    return Template(text, required=frozenset({"text"}), optional=frozenset({"index", "title"}))


def fill(text: str, values: Mapping[str, object]) -> str:
    """Return a text with its placeholders filled in."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), text)


Templates = Mapping[str, Mapping[str, Template]]
"""Module -> role -> template."""
Texts = Mapping[str, Mapping[str, str]]
"""Module -> role -> text."""


@dataclass(frozen=True, slots=True)
class Shot:
    """A demonstration: what a module was sent, and what it answered."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    user: Annotated[str, Field(min_length=1)]
    """The user message; of a context that grows, the first one."""
    assistant: Annotated[str, Field(min_length=1)]
    """The reply; of a context that grows, all that followed: the model's turns, and what was added between them."""


_SHOTS = TypeAdapter(list[Shot])


@dataclass(frozen=True, slots=True)
class ModulePrompt:
    """Parts of a module's prompt that a prompt optimiser may change."""

    instructions: str
    """A text with placeholders of its role."""
    shots: tuple[Shot, ...] = ()


@runtime_checkable
class PromptedTask(Protocol):
    """A task whose program's prompts can be read, replaced and written: all of mmrl's own without DSPy."""

    all_prompts: Prompts

    def make_program(self, prompts: Prompts) -> Program:
        """Build a program that uses these prompts; the task stays as it is."""
        ...

    def shot_of(self, path: Sequence[Call], module: str) -> Shot | None:
        """Make a demonstration of a rollout's calls (first call first): the module's first call, or its whole context.

        None where the module made no call that can be shown: none at all, an empty or cut reply, one that does not
        parse, or a prompt whose last message cannot be told apart from what stands in it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one program; never changed, so programs with other prompts stand beside each other."""

    templates: Templates
    texts: Texts
    shots: Mapping[str, tuple[Shot, ...]] = EMPTY
    """Module -> demonstrations; a module without any is absent."""
    roles: Mapping[str, str] = EMPTY
    """Module -> the role that is its instructions; absent where nothing of it may be optimised."""

    def messages(
        self, module: str, *, system: str = "system", user: str = "user", **values: object
    ) -> list[dict[str, str]]:
        """Return the messages of a call, by the roles `system` and `user` of its module, with `values` filled in."""
        first, last = self.text(module, system, **values), self.text(module, user, **values)
        return messages(first, last, self.shots.get(module, ()))

    def text(self, module: str, role: str, **values: object) -> str:
        """Return the text of a role, with those of `values` filled in that the role has placeholders for."""
        template = self.templates[module][role]
        names = template.required | template.optional
        return fill(self.texts[module][role], {name: value for name, value in values.items() if name in names})

    def documents(
        self, module: str, passages: Sequence[Passage], words: int | None = None, first: int = 1
    ) -> list[str]:
        """Format documents by the role `document` of a module, numbered from `first`, each cut to `words` words."""
        return [
            self.text(module, "document", index=index, title=passage["title"], text=first_words(passage["text"], words))
            for index, passage in enumerate(passages, first)
        ]

    def by_module(self) -> dict[str, ModulePrompt]:
        """Return instructions and demonstrations of each module."""
        return {
            module: ModulePrompt(self.texts[module][role], self.shots.get(module, ()))
            for module, role in self.roles.items()
        }

    def replaced(self, prompts: Mapping[str, ModulePrompt]) -> Prompts:
        """Return a copy with other instructions and demonstrations for some modules.

        Raises:
            ConfigError: an unknown module, or instructions without a placeholder that they must have.
        """
        texts, shots = dict(self.texts), dict(self.shots)
        problems: list[str] = []
        for module, prompt in prompts.items():
            role = self.roles.get(module)
            if role is None:
                problems.append(unknown("prompts", module, self.roles))
                continue
            problems += self.templates[module][role].problems(f"prompts: {module}.{role}", prompt.instructions)
            texts[module] = {**texts[module], role: prompt.instructions}
            shots[module] = prompt.shots
        refuse(problems)
        return replace(self, texts=texts, shots={module: demos for module, demos in shots.items() if demos})

    def write(self, path: Path) -> None:
        """Write the file that `load_prompts` reads back: instructions, demonstrations, and whatever else differs from
        the defaults."""
        import yaml  # here: most runs write none

        content: dict[str, object] = {}
        for module, texts in self.texts.items():
            defaults = self.templates[module]
            entry: dict[str, object] = {
                role: text
                for role, text in texts.items()
                if role == self.roles.get(module) or text != defaults[role].text
            }
            shots = [{"user": shot.user, "assistant": shot.assistant} for shot in self.shots.get(module, ())]
            if shots:
                entry[DEMONSTRATIONS] = shots
            if entry:
                content[module] = entry

        class Dumper(yaml.SafeDumper):
            """Texts of several lines as blocks, which people can read and change."""

        def block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
            # YAML folds the line breaks of Unicode that stand outside of double quotes.
            quoted = '"' if re.search("[\r\x85\u2028\u2029\ufeff]", text) else None
            return dumper.represent_scalar("tag:yaml.org,2002:str", text, quoted or ("|" if "\n" in text else None))

        Dumper.add_representer(str, block)
        atomic_write(path, yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


def prompts_file(setting: str, task: str) -> Path:
    """Return the file that `task.prompts` names.

    Raises:
        ConfigError: `paper`, of a task that has no such set.
    """
    if setting != PAPER:
        return user_path(setting)
    folder = conf_dir() / "prompts" / PAPER
    file = folder / f"{_LIKE.get(task, task)}.yaml"
    if not file.is_file():
        tasks = sorted([*(path.stem for path in folder.glob("*.yaml")), *_LIKE])
        raise ConfigError(
            f"task.prompts: got '{PAPER}', which task {task} does not have ({', '.join(tasks)} have); expected a file"
        )
    return file


def load_prompts(templates: Templates, path: str | None) -> Prompts:
    """Load the default texts, replaced by those of the YAML file at `path`, and its demonstrations.

    The file holds `module: {role: text, demonstrations: [{user: text, assistant: text}]}`; whatever it does not name
    keeps its default. Only modules with instructions take demonstrations.

    Raises:
        ConfigError: no such file, not YAML, an unknown module or role, wrong placeholders or demonstrations; all
            problems at once.
    """
    instructing = {
        module: next(role for role, template in roles.items() if template.instructions)
        for module, roles in templates.items()
        if any(template.instructions for template in roles.values())
    }
    # A copy: several tasks of one process may replace different prompts.
    texts = {module: {role: t.text for role, t in roles.items()} for module, roles in templates.items()}
    shots: dict[str, tuple[Shot, ...]] = {}
    if path is None:
        return Prompts(templates, texts, roles=instructing)
    problems: list[str] = []
    for module, roles in _read(path).items():
        if module not in templates:
            problems.append(unknown(f"task.prompts: {path}", module, templates))
            continue
        if not isinstance(roles, Mapping):
            problems.append(f"task.prompts: {path}: {module}: got {type(roles).__name__}, expected role: text")
            continue
        for role, text in roles.items():
            where = f"task.prompts: {path}: {module}.{role}"
            if role == DEMONSTRATIONS:
                shots[module] = _shots(where, text, templates[module], problems)
            elif role not in templates[module]:
                problems.append(unknown(f"task.prompts: {path}: {module}", role, templates[module]))
            elif not isinstance(text, str):
                problems.append(f"{where}: got {type(text).__name__}, expected text")
            else:
                problems += templates[module][role].problems(where, text)
                texts[module][role] = text
    refuse(problems)
    return Prompts(templates, texts, {module: demos for module, demos in shots.items() if demos}, instructing)


def _shots(where: str, content: object, roles: Mapping[str, Template], problems: list[str]) -> tuple[Shot, ...]:
    """Parse a module's demonstrations; errors are added to `problems`."""
    if not any(template.instructions for template in roles.values()):
        problems.append(
            f"{where}: has no effect: a judge is shown none, and a program of DSPy takes its own from the JSON file "
            "that its `save` writes"
        )
        return ()
    try:
        return tuple(_SHOTS.validate_python(content))
    except ValidationError as error:
        for item in error.errors():
            path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
            problems.append(f"{where}{path}: {item['msg']}")
        return ()


def messages(system: str, user: str, shots: Iterable[Shot] = ()) -> list[dict[str, str]]:
    """Return a system message (none where its text is empty), demonstrations as turns, and a user message.

    In this order, since what all items share is forwarded once where it comes first.
    """
    conversation = [{"role": "system", "content": system}] if system else []
    for shot in shots:
        conversation += [{"role": "user", "content": shot.user}, {"role": "assistant", "content": shot.assistant}]
    return [*conversation, {"role": "user", "content": user}]


def shot_of(path: Sequence[Call], module: str) -> Shot | None:
    """See `PromptedTask.shot_of`; what was added to a growing context stands in the reply as it was added."""
    calls = [call for call in path if call.module == module]
    context = [*calls[:1], *takewhile(lambda call: call.turn > 0, calls[1:])]
    user = last_user(context[0].prompt_text) if context else None
    reply = "".join((call.prompt_text if call.turn else "") + call.text for call in context)
    # A reply that was cut, or that the program could not read, would teach just that.
    complete = all(call.ok and call.text.strip() and call.finish != "length" for call in context)
    return Shot(user, reply) if user and user.strip() and complete else None


def last_user(prompt_text: str) -> str | None:
    """The last message of a recorded prompt (`Call.prompt_text`), the user's; None where the messages are not a
    conversation: a text in them has lines that look like the start of a message."""
    starts = list(re.finditer(r"^\[(system|user|assistant)\] ", prompt_text, flags=re.MULTILINE))
    roles = " ".join(start[1] for start in starts)
    conversation = re.fullmatch(r"(system )?(user assistant )*user", roles)
    return prompt_text[starts[-1].end() :] if conversation else None


def _read(path: str) -> Mapping[str, object]:
    try:
        content = read_yaml(user_path(path))
    except DataError as error:
        raise ConfigError(f"task.prompts: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"task.prompts: {path}: got {type(content).__name__}, expected module: {{role: text}}")
    return content
