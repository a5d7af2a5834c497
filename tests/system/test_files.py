"""Files that are damaged or hostile."""

import gzip
import json
import math
import zlib
from typing import Any

import numpy as np
import pytest

from mmrl.errors import DataError
from mmrl.system.files import dumps, gunzip, read_yaml


def test_a_zipped_file_unpacks_to_so_much_and_no_more():
    data = gzip.compress(b"a" * 1000) + gzip.compress(b"b" * 24)  # files of several streams are gzip too
    assert gunzip(data, 1024) == b"a" * 1000 + b"b" * 24
    with pytest.raises(ValueError, match="unpacks to more than 1023 bytes"):
        gunzip(data, 1023)
    with pytest.raises(EOFError):
        gunzip(data[:-5], 1024)
    with pytest.raises(zlib.error):
        gunzip(data[:10] + b"\xff\xff\xff" + data[13:], 1024)


def test_json_is_strict_and_floats_read_back_bit_equal():
    numbers = {
        "a": math.nan,
        "b": [math.inf, np.float32("-inf"), 0.1],
        "c": {"d": np.array([1.0, math.nan])},
        "e": [5e-324, 0.1 + 0.2, np.float64(1 / 7), float(np.float32(1 / 3))],
    }
    expected = {"a": None, "b": [None, None, 0.1], "c": {"d": [1.0, None]}, "e": numbers["e"]}
    for indent in (None, 1):
        text = dumps(numbers, indent=indent)
        assert json.loads(text, parse_constant=pytest.fail) == expected
        assert json.loads(dumps({"x": 1, "y": "NaN"}, indent=indent)) == {"x": 1, "y": "NaN"}


def test_a_small_file_that_unpacks_to_a_gigabyte_is_never_unpacked():
    once = gzip.compress(b" " * 2**20, compresslevel=9)
    with pytest.raises(ValueError, match="unpacks to more"):
        gunzip(once * 1024, 2**21)


@pytest.mark.parametrize("text", ["[" * 5000, "a: [1", "a: 2000-99-99"])
def test_a_yaml_file_that_cannot_be_read_is_named(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(DataError, match=rf"{tmp_path}/config.yaml(:1)?: cannot be read: not YAML \("):
        read_yaml(tmp_path / "config.yaml")


def test_a_key_of_a_yaml_file_is_given_once_whatever_a_merge_brings_in(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {x: 1, 'y': 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\nd: {1: x, '1': y}\n")
    assert read_yaml(path) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": 2},
        "c": {"x": 3, "y": 4},
        "d": {1: "x", "1": "y"},
    }
    path.write_text(path.read_text() + "e:\n  x: 1\n  x: {1: x, 1: y}\na: 2\n")
    with pytest.raises(DataError) as caught:
        read_yaml(path)
    lines = [(7, 1), (7, "x"), (8, "a")]
    assert caught.value.problems == [f"{path}:{line}: {key}: given more than once" for line, key in lines]


@pytest.mark.parametrize("last", ["[*a7,*a7]", "[*a8]"], ids=["growing", "of itself"])
def test_aliases_that_grow_are_refused_before_anything_is_made_of_them(last, tmp_path):
    lines = ["a0: &a0 [" + ",".join("x" * 10) + "]"]
    lines += [f"a{n}: &a{n} [" + ",".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, 8)]
    (tmp_path / "config.yaml").write_text("\n".join([*lines, f"a8: &a8 {last}"]))
    with pytest.raises(DataError) as caught:
        read_yaml(tmp_path / "config.yaml")
    expected = "cannot be read: more than 1,000,000 values once its aliases are written out"
    assert caught.value.problems == [f"{tmp_path / 'config.yaml'}: {expected}"]
    (tmp_path / "config.yaml").write_text("\n".join(lines[:5]))
    read: Any = read_yaml(tmp_path / "config.yaml")
    assert read["a4"][9][9][9][9] == list("x" * 10)
