"""Messages between two processes, here two ends in one."""

from __future__ import annotations

import asyncio
import socket

import pytest

from roll_lite.distributed.strategy.sglang.compat.channel import Closed, PickleChannel


async def pair() -> tuple[PickleChannel, PickleChannel]:
    first, second = socket.socketpair()
    return await PickleChannel.over(first), await PickleChannel.over(second)


async def test_messages_arrive_whole_and_in_order() -> None:
    here, there = await pair()
    messages = [("generate", number, "x" * size) for number, size in enumerate((0, 5, 1_000_000, 7))]
    for message in messages:
        here.send(message)
    assert [await there.receive() for _ in messages] == messages
    here.close()
    there.close()


async def test_the_end_of_one_is_told_to_the_other() -> None:
    here, there = await pair()
    waiting = asyncio.create_task(there.receive())
    here.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(waiting, 30)
    there.send("into the void")  # is lost, and no error
    there.close()
