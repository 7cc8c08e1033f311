"""Broken HTTP of all kinds: every connection is answered or closed, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.cases.scene import CHAT, COMPLETIONS, chat, completion, scene
from tests.fakes.client import as_json

CONNECTIONS = 1000
AT_ONCE = 20
ANSWER_S = 10.0
JUNK = (b"\0", b"\r", b"\n", b"\r\n\r\n", b":", b" ", b"\xff", b"Transfer-Encoding: chunked\r\n")


def requests() -> tuple[bytes, ...]:
    """Return valid ones, on which the broken ones are modelled."""
    found = []
    for path, body in ((CHAT, chat(max_tokens=2)), (COMPLETIONS, completion(max_tokens=2))):
        raw = as_json(body)
        head = b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n" % path.encode()
        found.append(head + b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw))
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(raw), raw)
        found.append(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
    found.append(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
    found.append(b"GET /metrics HTTP/1.0\r\n\r\n")
    return tuple(found)


def broken(rng: random.Random, sound: bytes) -> bytes:
    """Return a request with one to three things wrong with it."""
    raw = bytearray(sound)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(raw)) if raw else 0
        match rng.randrange(6):
            case 0:
                del raw[at:]
            case 1:
                raw[at : at + 1] = rng.choice(JUNK)
            case 2:
                raw[at:at] = rng.choice(JUNK)
            case 3:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 4:
                del raw[at : at + rng.randrange(1, 9)]
            case _:
                other = rng.randrange(len(raw) + 1)
                raw[at:at] = raw[min(at, other) : max(at, other)]
    return bytes(raw)


async def send(port: int, sent: bytes, cut: int) -> bytes:
    """Send it in two pieces, end the sending, and return all that comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    came = b""
    try:
        async with asyncio.timeout(ANSWER_S):
            writer.write(sent[:cut])
            await asyncio.sleep(0)
            writer.write(sent[cut:])
            writer.write_eof()
            while piece := await reader.read(65536):
                came += piece
    except ConnectionError:
        return came  # closed, which is an answer, too
    finally:
        writer.close()
    return came


@pytest.mark.case("C89")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_broken_requests_are_answered_or_closed_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    sound = requests()
    answers: list[bytes] = []
    async with scene() as stage:
        numbers: Iterator[int] = iter(range(CONNECTIONS))

        async def client() -> None:
            for _ in numbers:
                sent = broken(rng, rng.choice(sound))
                answers.append(await send(stage.port, sent, rng.randrange(len(sent) + 1)))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(client())
        good = await stage.post(CHAT, chat(max_tokens=2))
        await stage.assert_quiescent()

    assert good.status == 200
    assert len(answers) == CONNECTIONS
    for came in answers:
        assert not came or came.startswith(b"HTTP/1."), came
        assert b" 500 " not in came.split(b"\r\n", 1)[0], came
        assert b"Traceback" not in came
