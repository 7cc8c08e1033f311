"""Every setting of pdproxy: name, type, default, and why the default is what it is.

Rule: a `Settings` that exists is valid as a whole; nothing after it checks an option again. Zero
stands for "no limit" only where the help says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Self, TypeVar

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from pdproxy.core.instance import Endpoint
from pdproxy.core.policy import POLICIES
from pdproxy.runtime import setting_types as types
from pdproxy.runtime.access import Access
from pdproxy.runtime.bounds import Bounds
from pdproxy.runtime.cautions import cautions
from pdproxy.runtime.cross_checks import Inconsistent, cross_faults
from pdproxy.runtime.instances_arg import expand, pair, unique
from pdproxy.runtime.observing import Observing
from pdproxy.runtime.options import Arity, Group, Option, Origin, options_of, setting
from pdproxy.runtime.upkeep import Upkeep

T = TypeVar("T")

_FLAG_ONLY = frozenset((Origin.FLAG,))


def _instances(default: T, metavar: str, text: str, alias: str) -> T:
    option = Option(
        Group.INSTANCES, metavar, text, arity=Arity.MANY, aliases=(alias,), separators=","
    )
    return setting(default, option)


def _short_form(default: T, text: str) -> T:
    return setting(default, Option(Group.INSTANCES, "HOST:PORTS", text, arity=Arity.GROWING))


def _listening(default: T, metavar: str, text: str) -> T:
    return setting(default, Option(Group.LISTENING, metavar, text))


def _routing(default: T, metavar: str, text: str, example: str = "") -> T:
    return setting(default, Option(Group.ROUTING, metavar, text, example=example))


class Settings(Access, Bounds, Observing, Upkeep):
    """The settings of one run; frozen. `pdproxy.runtime.sources.load_settings` fills them.

    Constructing it directly reads neither the environment nor any file.

    Attributes:
        origins: per field that was set, where its value came from.
        reread: reads the same sources again; None if it was built without them.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # --- Instances
    prefillers: tuple[types.Instances, ...] = _short_form(
        (),
        "prefillers, such as A:7100-7103 B:7100,7102 [::1]:7100 https://C:8443; may be repeated. "
        "Without any, the proxy starts and waits for /instances/add",
    )
    decoders: tuple[types.Instances, ...] = _short_form((), "decoders, in the same form")
    prefiller_hosts: tuple[types.EngineHost, ...] = _instances(
        (), "HOST", "hosts of prefillers, one for each of --prefiller-ports", "prefiller_host"
    )
    prefiller_ports: tuple[types.Port, ...] = _instances(
        (), "PORT", "ports of prefillers, one for each of --prefiller-hosts", "prefiller_port"
    )
    decoder_hosts: tuple[types.EngineHost, ...] = _instances(
        (), "HOST", "hosts of decoders, one for each of --decoder-ports", "decoder_host"
    )
    decoder_ports: tuple[types.Port, ...] = _instances(
        (), "PORT", "ports of decoders, one for each of --decoder-hosts", "decoder_port"
    )
    max_waiting_retries: types.Attempts = setting(
        3,
        Option(
            Group.INSTANCES,
            "N",
            "probes of an instance that was added by a call before it is "
            "dropped; 0 and less mean 1",
        ),
    )
    waiting_retry_interval: types.PositiveDuration = setting(
        10.0,
        Option(
            Group.INSTANCES,
            "SECONDS",
            "time between two probes of an instance that was added by a call",
        ),
    )

    # --- Listening
    host: types.Host = _listening(
        "localhost", "HOST", "name or address to listen on; 0.0.0.0 or :: for all of this machine's"
    )
    port: types.Port = _listening(1999, "PORT", "TCP port to listen on")
    listen_backlog: types.Count = _listening(
        4096,
        "N",
        "connections that the kernel holds until they are accepted; a burst of clients needs "
        "more than the usual 128",
    )
    workers: types.Amount = _listening(
        1, "N", "processes that serve requests, 0: as many as there are processors"
    )

    # --- Routing
    prefill_policy: types.PolicyName = _routing(
        "least_load", "NAME", f"how a prefiller is picked: {', '.join(POLICIES)}"
    )
    decode_policy: types.PolicyName = _routing(
        "least_load", "NAME", "how a decoder is picked, of the same"
    )
    seed: types.Whole | None = _routing(
        None, "N", "start of the policies' random numbers, to repeat a run exactly", "7"
    )
    max_retries: types.Attempts = _routing(
        3,
        "N",
        "attempts in total per leg, each on another instance if there is one; 0 and less mean 1",
    )
    retry_delay: types.Duration = _routing(
        0.1,
        "SECONDS",
        "pause before the second attempt of a leg; it doubles with each and varies at "
        "random, so that a busy engine gets time and retries do not come in step",
    )
    kv_handle_ttl: types.PositiveDuration = _routing(
        25.0,
        "SECONDS",
        "age at which a prefiller's KV handle is no longer used; has to be below the "
        "time after which the engines give up its KV cache (30 s in vLLM)",
    )
    on_no_prefiller: types.OnNoPrefiller = _routing(
        "fail",
        "WHAT",
        "when no prefiller serves, or all attempts on them failed: fail, with 503 and Retry-After, "
        "or decode-only: a decoder computes the prompt itself",
    )
    recompute: types.Switch = _routing(
        True,
        "on|off",
        "continue an answer that a decoder gives back for lack of KV cache",
    )
    token_ids: types.TokenIds = _routing(
        "auto",
        "WHEN",
        "when engines are asked for token ids, which make a continuation exact and which clients "
        "do not see: always, never, or auto: once a decoder has given an answer back, and for "
        "prompts of token ids",
    )
    continue_lost: types.Switch = _routing(
        True,
        "on|off",
        "continue a stream whose decoder was lost in the middle, in the same way",
    )
    max_rounds: types.Count = _routing(
        12,
        "N",
        "prefill and decode rounds of one prompt, the first included; beyond them the answer ends "
        "with an error",
    )
    reasoning_end_id: types.Amount | None = _routing(
        None,
        "ID",
        "token that ends the reasoning of the model; asked of an engine's /tokenize if not given",
        "128799",
    )
    models_cache: types.Duration = _routing(
        5.0,
        "SECONDS",
        "time for which the answer of /v1/models is kept; 0 asks the engines each time",
    )

    # --- Other
    config: types.File | None = setting(
        None,
        Option(
            Group.OTHER,
            "FILE",
            "TOML file with settings, named as the flags with underscores",
            sources=frozenset((Origin.FLAG, Origin.ENV)),
        ),
    )
    check_config: types.Switch = setting(
        False,
        Option(
            Group.OTHER,
            "",
            "check all settings, print the effective ones and exit",
            arity=Arity.NONE,
            sources=_FLAG_ONLY,
        ),
    )
    demo: types.Switch = setting(
        False,
        Option(
            Group.OTHER,
            "",
            "start four simulated engines, and the proxy in front of them",
            arity=Arity.NONE,
            sources=_FLAG_ONLY,
        ),
    )

    origins: Mapping[str, Origin] = Field(default={}, exclude=True, repr=False)
    reread: Callable[[], Settings] | None = Field(default=None, exclude=True, repr=False)

    @classmethod
    def settings_customise_sources(  # type: ignore[explicit-override]  # typing has it from 3.12
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values from the caller alone; `sources` orders flags, environment and file."""
        return (init_settings,)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if faults := tuple(cross_faults(self)):
            raise Inconsistent(faults)
        return self

    @property
    def worker_count(self) -> int:
        """How many processes serve."""
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def prefill_endpoints(self) -> tuple[Endpoint, ...]:
        """The prefillers to start with, each once, as typed first."""
        return unique(self._prefillers_as_typed())[0]

    @property
    def decode_endpoints(self) -> tuple[Endpoint, ...]:
        """The decoders to start with, each once, as typed first."""
        return unique(self._decoders_as_typed())[0]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the operator should know but what does not stop the proxy; a line each."""
        prefill = unique(self._prefillers_as_typed())[1]
        decode = unique(self._decoders_as_typed())[1]
        return (
            *(f"prefill instance {text}" for text in prefill),
            *(f"decode instance {text}" for text in decode),
            *cautions(self),
        )

    def _prefillers_as_typed(self) -> Iterator[Endpoint]:
        yield from pair(self.prefiller_hosts, self.prefiller_ports)
        yield from chain.from_iterable(map(expand, self.prefillers))

    def _decoders_as_typed(self) -> Iterator[Endpoint]:
        yield from pair(self.decoder_hosts, self.decoder_ports)
        yield from chain.from_iterable(map(expand, self.decoders))


OPTIONS = options_of(Settings)
