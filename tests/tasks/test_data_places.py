"""Data in several files: shards of a folder, patterns, lists, folders of `save_to_disk`; names that are misspelt."""

import json
import random
import shutil
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset, DatasetDict

from mmrl.config.tasks import DataConfig
from mmrl.errors import ConfigError, DataError
from mmrl.store.journal import load_rollouts
from mmrl.store.policy import resolve
from mmrl.tasks.data.corpus import Corpus
from mmrl.tasks.data.rows import Source, same_rows
from mmrl.tasks.prompts import load_prompts
from tests.helpers.programs import saved

ROWS = [{"id": f"r{n}", "question": f"Who made {n}?", "answer": ["Ada", str(n)], "more": {"n": n}} for n in range(9)]


def read(spec, split="train"):
    return [row.values for row in Source(f"task.data.{split}", str(spec)).rows(split)]


def refusal(spec, split="train", key=None):
    with pytest.raises(DataError) as caught:
        Source(key or f"task.data.{split}", str(spec)).rows(split)
    (message,) = caught.value.problems
    assert message.startswith(f"{key or f'task.data.{split}'}: ") and "\n" not in message
    return message


def shards(folder, kind="parquet", count=3, before="", rows=ROWS):
    """The rows in `count` files, made in another order than that of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = list(range(count))
    random.Random(1).shuffle(numbers)
    size = -(-len(rows) // count)
    for n in numbers:
        saved(folder / f"{before}{n:05}-of-{count:05}.{kind}", rows[n * size : (n + 1) * size])
    return folder


def test_shards_of_a_folder_a_pattern_and_a_list_are_the_rows_in_order(tmp_path):
    for kind in ("parquet", "jsonl", "json"):
        folder = shards(tmp_path / kind, kind)
        (folder / "_SUCCESS").touch()
        (folder / ".hidden.jsonl").write_text("{}\n")
        (folder / "README.md").touch()
        assert read(folder) == read(f"{folder}/*.{kind}") == read(f"{tmp_path}/{kind[:3]}*/**/*-of-*.{kind}") == ROWS
        names = [str(path) for path in sorted(folder.glob(f"0*.{kind}"))]
        assert read(",".join(names)) == read(DataConfig.model_validate({"train": names}).train) == ROWS
        assert read(",".join(reversed(names))) == ROWS[6:] + ROWS[3:6] + ROWS[:3], "a list is in its own order"
    named = saved(tmp_path / "a,b.jsonl", ROWS)
    assert read(named) == ROWS
    with pytest.raises(ValueError, match=r"got 'a,b\.jsonl' in a list"):
        DataConfig.model_validate({"train": ("a,b.jsonl", "c.jsonl")})


@pytest.mark.parametrize("layout", ["data/train-{}", "train/{}", "train/part-{}", "train_{}"])
def test_of_a_folder_with_several_splits_each_gets_its_own(layout, tmp_path):
    names = {"train": "train", "dev": "validation", "test": "test"}
    for n, name in enumerate(names.values()):
        place = tmp_path / layout.format("").replace("train", name)
        folder, before = (place, "") if layout.endswith("/{}") else (place.parent, place.name)
        shards(folder, before=before, count=2, rows=ROWS[n * 3 : n * 3 + 3])
    for n, split in enumerate(names):
        assert read(tmp_path, split) == ROWS[n * 3 : n * 3 + 3]
    assert same_rows(dict.fromkeys(names, str(tmp_path))) == {}
    for path in tmp_path.rglob("*validation*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "holds files of test, train, none of dev; expected a pattern" in refusal(tmp_path, "dev")


def test_what_save_to_disk_wrote(tmp_path):
    table = Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one", num_shards=2)
    assert read(tmp_path / "one") == table.to_list() == ROWS
    DatasetDict({"train": table.select(range(6)), "validation": table.select(range(6, 9))}).save_to_disk(tmp_path / "d")
    assert (read(tmp_path / "d"), read(tmp_path / "d", "dev")) == (ROWS[:6], ROWS[6:])
    assert read(tmp_path / "d" / "validation") == ROWS[6:]
    assert f"has the splits train, dev, none is test; expected one of them, such as {tmp_path}" in refusal(
        tmp_path / "d", "test"
    )
    # rows in another order than on the disk
    table.select([4, 2, 7]).save_to_disk(tmp_path / "some")
    assert [row["id"] for row in read(tmp_path / "some")] == ["r4", "r2", "r7"]
    with pyarrow.ipc.new_file(str(tmp_path / "file.arrow"), table.data.table.schema) as writer:
        writer.write_table(table.data.table)
    assert read(tmp_path / "file.arrow") == ROWS
    documents = Dataset.from_list([{"title": "T", "text": f"text {n}"} for n in range(3)])
    documents.save_to_disk(tmp_path / "corpus")
    assert len(list(Corpus([str(tmp_path / "corpus")]).passages())) == 3


def test_damaged_and_missing_shards_are_named(tmp_path):
    folder = shards(tmp_path / "p")
    second = folder / "00001-of-00003.parquet"
    second.write_bytes(second.read_bytes()[:-20])
    assert f"{second} is not a parquet file" in refusal(folder)
    second.unlink()
    assert f"'{folder}': {second} is missing" in refusal(folder)
    third = shards(tmp_path / "j", "jsonl") / "00002-of-00003.jsonl"
    third.write_text('{"id": 1}\n{"id": ')
    assert f"{third} line 2: not JSON" in refusal(tmp_path / "j")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "s", num_shards=2)
    shard = tmp_path / "s" / "data-00001-of-00002.arrow"
    whole = shard.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-8], b"x" * 100, b""):
        shard.write_bytes(content)
        assert str(shard) in refusal(tmp_path / "s")
    shard.unlink()
    assert f"{shard} is missing" in refusal(tmp_path / "s")
    for content in ("{", "[]", "{}", json.dumps({"_data_files": [1]})):
        (tmp_path / "s" / "state.json").write_text(content)
        assert "state.json': cannot be read" in refusal(tmp_path / "s")


def test_a_pattern_may_leave_shards_out_which_is_said(tmp_path, caplog):
    folder = shards(tmp_path)
    assert read(f"{folder}/0000[02]*") == ROWS[:3] + ROWS[6:]
    assert f"{folder}/00001-of-00003.parquet is missing" in caplog.text
    caplog.clear()
    assert read(folder / "00000-of-00003.parquet") == ROWS[:3] and not caplog.text


def test_folders_that_could_be_read_in_several_ways(tmp_path):
    shards(tmp_path)
    (tmp_path / "info.json").write_text("[]")
    message = refusal(tmp_path)
    assert "files of several formats (3 of .parquet, 1 of .json)" in message
    assert read(message.rpartition("such as ")[2]) == ROWS
    (tmp_path / "empty").mkdir()
    assert "is a folder without a .json" in refusal(tmp_path / "empty")
    assert "matches no file" in refusal(tmp_path / "*.csv") and "matches no file" in refusal(f"{tmp_path}/*.parquet,x")
    saved_as = tmp_path / "x.xls"
    saved_as.touch()
    assert f"'{saved_as}': has another format" in refusal(f"{tmp_path}/x*")


def test_a_misspelt_name_finds_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shards(tmp_path / "shards")
    saved(tmp_path / "train.jsonl", ROWS)
    for key in ("task.data.train", "task.corpus", "algo.file"):
        assert refusal("trian.jsonl", key=key).endswith("; did you mean 'train.jsonl'?")
    assert refusal(tmp_path / "shard" / "00000-of-00003.parquet").endswith("; did you mean 'shards'?")
    assert refusal("train.jsonl,trai.jsonl").endswith("'trai.jsonl': matches no file; did you mean 'train.jsonl'?")
    # it could be a hub id
    assert refusal("shard/x").endswith("; did you mean 'shards'?")
    assert "did you mean" not in refusal("elsewhere.jsonl")
    saved(tmp_path / "mine.yaml", "{}")
    for read_at in (
        lambda: Corpus(["trainn.jsonl"]),
        lambda: load_prompts({}, "mien.yaml"),
        lambda: load_rollouts(Path("trainn.jsonl")),
        lambda: resolve("./shard"),
    ):
        with pytest.raises(ConfigError, match=r"; did you mean '(train\.jsonl|mine\.yaml|shards)'\?$"):
            read_at()


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    """By whichever spelling: its records would be asked twice as often."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n')
    for spec in (f"{file},{file}", f"{tmp_path},{tmp_path}/*.jsonl", f"{file},{tmp_path}/../{tmp_path.name}/a.jsonl"):
        with pytest.raises(DataError, match=r"task.data.train: .*a.jsonl is named twice"):
            Source("task.data.train", spec).files("train")


def test_splits_that_share_a_file_are_seen(tmp_path):
    one, two = saved(tmp_path / "a.jsonl", ROWS), saved(tmp_path / "b.jsonl", ROWS)
    pattern = str(tmp_path / "*.jsonl")
    assert same_rows({"train": one, "dev": two}) == {}
    assert same_rows({"train": one, "dev": f"{tmp_path}/./a.jsonl"}) == {
        ("train", "dev"): f"train and dev are both {one}"
    }
    shared = same_rows({"train": pattern, "dev": two, "test": "owner/name"})
    assert shared == {("train", "dev"): f"train ({pattern}) and dev ({two}) have files in common"}
    shared = same_rows({"train": one, "dev": two, "test": pattern})
    assert list(shared) == [("train", "dev", "test")]
