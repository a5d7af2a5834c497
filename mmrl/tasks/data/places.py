"""Files that a source of data names: a file, a folder of shards or of `save_to_disk`, a pattern, or several of these.

Shards are read in order of their names. What is not all there is refused: rows that are missing would not be missed.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator
from glob import glob
from pathlib import Path

from mmrl.errors import DataError
from mmrl.system.files import similar, user_path

FORMATS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
STATE, SPLITS_FILE = "state.json", "dataset_dict.json"
"""Files of a folder that `datasets` has saved (`save_to_disk`): the list of its shards; that of its splits."""
WORDS = {"train": "train", "validation": "dev", "valid": "dev", "val": "dev", "dev": "dev", "test": "test"}
"""Word in the name of a file or folder -> split."""
log = logging.getLogger("mmrl.data")
_SHARD = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")


def names_files(spec: str) -> bool:
    """Return True if a source names what is on this machine: it is there, or a pattern, or of several parts."""
    return user_path(spec).exists() or len(parts_of(spec)) > 1 or any(sign in spec for sign in "*?[")


def parts_of(spec: str) -> list[str]:
    """Return the sources in a list of them; a file whose name has a comma is one."""
    return [spec] if user_path(spec).exists() else [part for part in spec.split(",") if part]


def files_of(spec: str, split: str) -> list[Path]:
    """Return the files of one source, which is on this machine.

    Args:
        spec: a file, a folder or a pattern.
        split: `train`, `dev` or `test`: the files of a folder that names several splits are those of this one.

    Raises:
        DataError: none, one of another format, one that is not there; without the key that named the source.
    """
    path = user_path(spec)
    if path.is_dir():
        return _of_folder(path, split)
    found = [path] if path.is_file() else sorted(map(Path, glob(str(path), recursive=True)))
    files = [file for file in found if file.is_file()]
    if not files:
        raise DataError(f"'{spec}': matches no file{similar(path)}")
    if wrong := [file for file in files if file.suffix.lower() not in FORMATS]:
        raise DataError(f"'{wrong[0]}': has another format; expected {', '.join(FORMATS)}")
    # A pattern may be meant to take some of the shards.
    if len(files) > 1 and (missing := missing_shard(files)):
        log.warning("%s: %s", spec, missing)
    return files


def files_below(folder: Path, ends: Collection[str] = FORMATS) -> list[Path]:
    """Return the files with these ends in a folder and below it, in order of their names, but for hidden ones."""
    found = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in ends and path.is_file())
    return [path for path in found if not any(part[0] in "._" for part in path.relative_to(folder).parts)]


def is_saved(folder: Path) -> bool:
    """Return True for a folder that `datasets` has saved."""
    return (folder / STATE).is_file() or (folder / SPLITS_FILE).is_file()


def _of_folder(folder: Path, split: str) -> list[Path]:
    if (folder / STATE).is_file():
        files = [folder / name for name in _listed(folder / STATE)]
        if gone := [file for file in files if not file.is_file()]:
            raise DataError(f"'{folder}': {gone[0]} is missing")
        return files
    if (folder / SPLITS_FILE).is_file():
        splits = {WORDS.get(name, name): folder / name for name in _listed(folder / SPLITS_FILE)}
        if split not in splits:
            raise DataError(
                f"'{folder}': has the splits {', '.join(splits)}, none is {split}; expected one of them, "
                f"such as {next(iter(splits.values()), folder)}"
            )
        return _of_folder(splits[split], split)
    files = files_below(folder)
    if not files:
        raise DataError(f"'{folder}': is a folder without a {', '.join(FORMATS)} file")
    kinds = Counter(file.suffix.lower() for file in files)
    if len(kinds) > 1:
        listed = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
        raise DataError(
            f"'{folder}': holds files of several formats ({listed}); expected a pattern, such as "
            f"{folder}/**/*{kinds.most_common(1)[0][0]}"
        )
    named = {file: _split_in(file.relative_to(folder)) for file in files}
    # As the hub's folders are: the files of all splits side by side.
    if len(splits_named := set(named.values())) > 1:
        files = [file for file in files if named[file] == split]
        if not files:
            listed = ", ".join(sorted(name or "no split" for name in splits_named))
            raise DataError(
                f"'{folder}': holds files of {listed}, none of {split}; expected a pattern, such as "
                f"{folder}/NAME*{next(iter(kinds))}"
            )
    if missing := missing_shard(files):
        raise DataError(f"'{folder}': {missing}")
    return files


def _split_in(path: Path) -> str | None:
    """Return the split that the name of a file, or of a folder that it is in, has in it."""
    words = (word for part in reversed(path.with_suffix("").parts) for word in re.split(r"[^a-z]+", part.lower()))
    return next((WORDS[word] for word in words if word in WORDS), None)


def _listed(file: Path) -> Iterator[str]:
    """Yield the names that a file of `save_to_disk` lists."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("_indices_data_files"):
            raise ValueError("rows in another order, as datasets before 2.0 wrote them: save it again")
        names = content["splits"] if file.name == SPLITS_FILE else [data["filename"] for data in content["_data_files"]]
        # Joined with the folder, such a name stays in it.
        yield from (Path(name).name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"'{file}': cannot be read: {error}") from None


def missing_shard(files: list[Path]) -> str:
    """Return the first file that is not there of those that are numbered (`00000-of-00003`), in words; or nothing."""
    numbered: dict[tuple[Path, str, str, str], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            before, number, count, after = match.groups()
            numbered.setdefault((file.parent, before, count, after), set()).add(int(number))
    for (folder, before, count, after), numbers in numbered.items():
        first = int(int(count) in numbers)
        for number in range(first, first + int(count)):
            if number not in numbers:
                return f"{folder / f'{before}{number:0{len(count)}}-of-{count}{after}'} is missing"
    return ""
