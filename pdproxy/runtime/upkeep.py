"""The settings by which instances are found, watched and left out."""

from __future__ import annotations

from typing import TypeVar

from pydantic_settings import BaseSettings

from pdproxy.runtime import setting_types as types
from pdproxy.runtime.options import Arity, Group, Option, setting

T = TypeVar("T")


def _health(default: T, metavar: str, text: str) -> T:
    return setting(default, Option(Group.HEALTH, metavar, text))


def _name(default: T, text: str) -> T:
    return setting(default, Option(Group.INSTANCES, "NAME:PORT", text, arity=Arity.GROWING))


class Upkeep(BaseSettings):
    """Names, probes, ejection and slow start; part of `Settings`."""

    # --- Instances
    prefiller_dns: tuple[types.Instances, ...] = _name(
        (), "names of prefillers with ports: every address of a name is one, in the same form"
    )
    decoder_dns: tuple[types.Instances, ...] = _name((), "names of decoders, in the same form")
    dns_interval: types.PositiveDuration = setting(
        10.0,
        Option(
            Group.INSTANCES,
            "SECONDS",
            "between two resolutions of --prefiller-dns and --decoder-dns; addresses that are no "
            "longer there are drained, and a resolution that fails changes nothing",
        ),
    )

    # --- Health
    probe_interval: types.PositiveDuration = _health(
        2.0, "SECONDS", "between two probes of an instance, in service or not; varied by a fifth"
    )
    probe_timeout: types.PositiveDuration = _health(
        5.0, "SECONDS", "for an engine to answer a probe; a busy engine answers late"
    )
    scrape_interval: types.Duration = _health(
        15.0,
        "SECONDS",
        "between two looks at an engine's /metrics for its KV cache and queue, 0: none; engines "
        "without it are fine",
    )
    probe_failures: types.Count = _health(
        3,
        "N",
        "failed probes in a row that eject an instance; a refused connection does at once",
    )
    eject_after: types.Count = _health(
        3,
        "N",
        "failed requests in a row that eject an instance; a refused connection does at once, "
        "errors that are the client's fault never count",
    )
    eject_time: types.PositiveDuration = _health(
        1.0,
        "SECONDS",
        "an ejected instance stays out at least, until a probe finds it well; doubled each time "
        "until a request succeeds",
    )
    max_eject_time: types.PositiveDuration = _health(
        30.0, "SECONDS", "what the doubling of --eject-time stops at"
    )
    slow_start: types.Duration = _health(
        10.0,
        "SECONDS",
        "over which an instance that joins or returns gets its full share of requests, 0: at once",
    )
