"""Writes a request body that is not at hand as a whole, as fast as the engine takes it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext

from pdproxy import errors
from pdproxy.upstream.connection import Connection

_LAST_CHUNK = b"0\r\n\r\n"


async def upload(
    connection: Connection, body: AsyncIterable[bytes], content_length: int | None
) -> None:
    """Write the parts of `body`, in chunks unless its length is known; never raises.

    A failure of `body` is handed to the connection, which aborts itself and tells who waits. A
    generator is closed at the end.
    """
    try:
        async with _closing(body):
            await _write(connection, body, content_length)
    except Exception as error:  # noqa: BLE001 -- whatever the caller's body raises is the caller's
        connection.fail_upload(error)


def _closing(body: AsyncIterable[bytes]) -> AbstractAsyncContextManager[object]:
    return aclosing(body) if isinstance(body, AsyncGenerator) else nullcontext()


async def _write(
    connection: Connection, body: AsyncIterable[bytes], content_length: int | None
) -> None:
    if content_length is None:
        await _write_chunks(connection, body)
        connection.end_upload(_LAST_CHUNK)
    else:
        await _write_exactly(connection, body, content_length)
        connection.end_upload(b"")


async def _write_chunks(connection: Connection, body: AsyncIterable[bytes]) -> None:
    async for part in body:
        if part:
            await connection.write(b"%x\r\n%b\r\n" % (len(part), part))


async def _write_exactly(
    connection: Connection, body: AsyncIterable[bytes], content_length: int
) -> None:
    rest = content_length
    async for part in body:
        rest -= len(part)
        if rest < 0:
            break
        if part:
            await connection.write(part)
    if rest:
        raise errors.InvalidRequest("the body does not have the announced length")
