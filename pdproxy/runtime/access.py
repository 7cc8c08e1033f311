"""The settings that say who may call, and how both wires are protected.

Rule: a key is a `SecretStr` from the moment it is read, so no log, fault or traceback shows it.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from pdproxy.runtime import setting_types as types
from pdproxy.runtime.options import Arity, Group, Option, Origin, setting

T = TypeVar("T")


def _security(default: T, metavar: str, text: str, example: str) -> T:
    return setting(default, Option(Group.SECURITY, metavar, text, example=example))


class Access(BaseSettings):
    """Keys and certificates; part of `Settings`."""

    # --- Security
    engine_api_key: types.Secret | None = _security(
        None, "KEY", "key sent to the engines in place of the client's Authorization", "secret"
    )
    openai_api_key: types.Secret | None = setting(
        None,
        Option(
            Group.SECURITY,
            "KEY",
            "key sent to the engines when the client sends no Authorization; "
            "from the environment only, empty counts as unset",
            sources=frozenset((Origin.ENV,)),
            env_name="OPENAI_API_KEY",
        ),
    )
    api_key_file: types.KeyFile | None = _security(
        None,
        "FILE",
        "more of --api-key, one a line; empty lines and lines from # on are skipped",
        "/etc/pdproxy/api-keys",
    )
    api_keys: tuple[types.Secret, ...] = setting(
        (),
        Option(
            Group.SECURITY,
            "KEY",
            "key that clients have to send as a bearer token; may be repeated. "
            "Without any, every client is served",
            arity=Arity.GROWING,
            aliases=("api_key",),
            flag_name="api_key",
            separators=",",
        ),
    )
    admin_token: types.Secret | None = _security(
        None,
        "TOKEN",
        "bearer token for /instances, /instances/*, /reset_prefix_cache, /dashboard/data and "
        "/debug/requests. Without it, they answer callers on this machine only; behind a reverse "
        "proxy on this machine everybody counts as such, so set it there",
        "secret",
    )
    instance_allow: tuple[types.AllowEntry, ...] = setting(
        (),
        Option(
            Group.SECURITY,
            "NETWORK",
            "the only addresses that engines may have, configured or added: networks such as "
            "10.0.0.0/8, addresses, names. Names that are not listed are resolved for that, each "
            "time a connection is opened. Without it, any",
            arity=Arity.MANY,
            separators=",",
        ),
    )
    ssl_certfile: types.File | None = _security(
        None,
        "FILE",
        "certificate chain (PEM); with --ssl-keyfile the proxy speaks https",
        "/etc/pdproxy/tls.crt",
    )
    ssl_keyfile: types.File | None = _security(
        None, "FILE", "private key (PEM) of --ssl-certfile", "/etc/pdproxy/tls.key"
    )
    engine_ca_file: types.File | None = _security(
        None,
        "FILE",
        "certificates (PEM) that https:// engines are checked against, in place of the system's",
        "/etc/pdproxy/engines-ca.crt",
    )
    engine_insecure: types.Switch = setting(
        False,
        Option(Group.SECURITY, "", "accept any certificate of https:// engines", arity=Arity.NONE),
    )

    @field_validator("api_keys", mode="after")
    @classmethod
    def _add_keys_of_file(cls, keys: tuple[SecretStr, ...], info: ValidationInfo) -> object:
        path = info.data.get("api_key_file")
        listed = types.read_key_file(path) if path else ()
        return tuple(dict.fromkeys((*keys, *listed)))
