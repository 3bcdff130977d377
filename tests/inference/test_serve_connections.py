"""Connections to `paceline serve` that send no request."""

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from paceline.inference.serving.connection import TimedConnection

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class HastyConnection(TimedConnection):
    header_limit_s = 0.3


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer after longer than headers may take."""
    await asyncio.sleep(0.6)
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


async def talk(*sent: bytes) -> bytes:
    """Return what a client receives until the server closes the connection.

    Args:
        sent: what the client sends; the last one repeatedly, as long as it can.
    """
    config = uvicorn.Config(answer, lifespan="off", log_level="critical")
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()

    def connect() -> HastyConnection:
        return HastyConnection(config, state, {}, loop)

    server = await loop.create_server(connect, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.05)
            writer.write(sent[-1])

    for each in sent[:-1]:
        writer.write(each)
    dripping = asyncio.create_task(drip())
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:
        return b"reset"
    finally:
        dripping.cancel()
        writer.close()
        server.close()


@pytest.mark.parametrize("sent", [(b"",), (b"GET / HTTP/1.1\r\nX: ", b"a")], ids=str)
def test_connection_without_a_request_is_closed(sent: tuple[bytes, ...]) -> None:
    assert asyncio.run(talk(*sent)) in (b"", b"reset")


def test_answer_may_take_longer_than_the_headers() -> None:
    received = asyncio.run(talk(REQUEST.replace(b"x\r\n", b"x\r\nConnection: close\r\n"), b""))
    assert received.endswith(b"\r\n\r\nok")


def test_dripping_after_an_answer_is_closed() -> None:
    assert b"\r\n\r\nok" in asyncio.run(talk(REQUEST + b"GET / HTTP/1.1\r\nX: ", b"a"))
