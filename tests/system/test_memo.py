"""A memo of replies: n equal requests get n replies, again after a kill; failures and torn lines are not in it."""

import asyncio
import itertools

import pytest

from mmrl.errors import CheckpointError
from mmrl.system.memo import Memo

ASKED = {"policy": "p", "prompt": (1, 2), "sampling": {"temperature": 1.0}}


def replies(path, count, greedy=False, request=ASKED, ask=None):
    """The replies to equal requests, made at once, and the numbers of those that were asked for."""
    asked = []

    async def answer(number):
        asked.append(number)
        await asyncio.sleep(0)
        return {"text": (f"reply {number}",)}

    async def all_of():
        memo = Memo(path)
        return await asyncio.gather(*(memo.reply(request, ask or answer, greedy=greedy) for _ in range(count)))

    return [reply["text"] for reply in asyncio.run(all_of())], asked


def test_equal_requests_get_as_many_replies_and_the_same_after_a_kill(tmp_path):
    path = tmp_path / "prompts" / "memo.jsonl"
    three = [[f"reply {number}"] for number in (1, 2, 3)]
    assert replies(path, 3) == (three, [1, 2, 3])
    assert replies(path, 5) == ([*three, ["reply 4"], ["reply 5"]], [4, 5])
    assert replies(path, 1, request={**ASKED, "policy": "q"}) == (three[:1], [1])
    assert replies(path, 5)[1] == []


def test_a_greedy_request_is_made_once(tmp_path):
    assert replies(tmp_path / "memo", 4, greedy=True) == ([["reply 1"]] * 4, [1])
    assert replies(tmp_path / "memo", 4, greedy=True) == ([["reply 1"]] * 4, [])


def test_a_failure_is_not_kept(tmp_path):
    numbers = itertools.count()

    async def failing(number):
        await asyncio.sleep(0)
        if next(numbers) == 0:
            raise OSError("no server")
        return {"text": number}

    for greedy in (False, True):
        numbers = itertools.count()
        with pytest.raises(OSError, match="no server"):
            replies(tmp_path / f"{greedy}", 1, greedy, ask=failing)
        assert replies(tmp_path / f"{greedy}", 1, greedy, ask=failing) == ([1], [])


def test_a_torn_last_line_is_dropped_and_another_damaged_one_named(tmp_path):
    path = tmp_path / "memo.jsonl"
    replies(path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert replies(path, 2)[1] == [2]
    assert path.read_bytes() == whole
    first, second = whole.decode().splitlines(keepends=True)
    changed = first.replace("reply 1", "reply 3")
    for damaged in ('{"key": "x"}\n', '{"key\n', '{"key": 1, "reply": {}}\n', changed, first.replace('-1"', '-3"')):
        assert damaged != first
        path.write_text(damaged + second)
        with pytest.raises(CheckpointError, match=rf"memo\.jsonl:1: .*; restore {tmp_path} from a copy, or delete it"):
            Memo(path)
