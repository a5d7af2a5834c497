"""Files that are damaged or hostile."""

import gzip
import zlib

import pytest

from mmrl.system.files import gunzip


def test_a_zipped_file_unpacks_to_so_much_and_no_more():
    data = gzip.compress(b"a" * 1000) + gzip.compress(b"b" * 24)  # files of several streams are gzip too
    assert gunzip(data, 1024) == b"a" * 1000 + b"b" * 24
    with pytest.raises(ValueError, match="unpacks to more than 1023 bytes"):
        gunzip(data, 1023)
    with pytest.raises(EOFError):
        gunzip(data[:-5], 1024)
    with pytest.raises(zlib.error):
        gunzip(data[:10] + b"\xff\xff\xff" + data[13:], 1024)


def test_a_small_file_that_unpacks_to_a_gigabyte_is_never_unpacked():
    once = gzip.compress(b" " * 2**20, compresslevel=9)
    with pytest.raises(ValueError, match="unpacks to more"):
        gunzip(once * 1024, 2**21)
