"""The KV pull between two engines, and what goes wrong with it.

A handle names the prefiller's HTTP port; the decoder asks it at `/sim/pull` for the blocks. Real
engines use a side channel for it, with the same outcomes.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import aiohttp
import orjson

from pdproxy.sim.config import SimConfig
from pdproxy.sim.handles import Pulled

PATH = "/sim/pull"
_TIMEOUT_S = 5.0
_OK = 200
_JSON = {"Content-Type": "application/json"}

JsonObject = Mapping[str, object]
Action = Literal["pull", "release", "extend"]


class LoadFailure(Exception):
    """The blocks could not be had: no such prefiller, or it has restarted since."""


@dataclass(frozen=True, slots=True)
class RemoteHandle:
    """The part of `kv_transfer_params` that a pull needs."""

    engine_id: str
    request_id: str
    block_ids: tuple[int, ...]
    host: str
    port: int


def parse_handle(params: JsonObject) -> RemoteHandle | None:
    """The handle in a decode request's parameters; None if it is malformed."""
    groups = params.get("remote_block_ids")
    blocks = groups[0] if isinstance(groups, list) and groups else None
    names = (params.get("remote_engine_id"), params.get("remote_request_id"))
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        return None
    if not isinstance(names[0], str) or not isinstance(names[1], str):
        return None
    if not isinstance(host, str) or not isinstance(port, int):
        return None
    return RemoteHandle(names[0], names[1], tuple(blocks), host, port)


def handle_params(handle: RemoteHandle, tokens: int, cached_tokens: int) -> dict[str, object]:
    """What a prefiller answers, key by key as vLLM's NixlConnector does."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(handle.block_ids)],
        "remote_engine_id": handle.engine_id,
        "remote_request_id": handle.request_id,
        "remote_host": handle.host,
        "remote_port": handle.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }


class Transfer:
    """The decoder's side; an async context manager that owns its HTTP session."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def pull(self, handle: RemoteHandle, tokens: int) -> Pulled:
        """Fetch the blocks and have them freed over there.

        Raises:
            LoadFailure: Nothing answers, or another engine does.
        """
        config = self._config
        reply = await self._ask(handle, "pull")
        delay_s = config.transfer_base_s + config.transfer_per_token_s * tokens
        if delay_s:
            await asyncio.sleep(delay_s)
        return Pulled(int(reply["state"]), bool(reply["is_valid"]), int(reply["tokens"]))

    async def notify(self, handle: RemoteHandle, action: Action) -> None:
        """Free a handle or extend its lease; a prefiller that is gone needs neither."""
        try:
            await self._ask(handle, action)
        except LoadFailure:
            return

    async def _ask(self, handle: RemoteHandle, action: Action) -> dict[str, int]:
        assert self._session is not None, "used outside its context"
        body = {
            "action": action,
            "engine_id": handle.engine_id,
            "request_id": handle.request_id,
            "block_ids": handle.block_ids,
        }
        url = f"http://{handle.host}:{handle.port}{PATH}"
        try:
            async with self._session.post(url, data=orjson.dumps(body), headers=_JSON) as response:
                if response.status == _OK:
                    reply: dict[str, int] = orjson.loads(await response.read())
                    return reply
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if action == "pull":
                await asyncio.sleep(self._config.load_failure_delay_s)
            raise LoadFailure(f"{url}: {error!r}") from error
        raise LoadFailure(f"{url}: another engine answers there")
