"""Types of settings: each reads what a flag, a variable or a file may hold, or says what is wrong.

Rule: a reader's complaint continues the sentence "<option>: <value> ...", so that it reads well
wherever the value came from, and it never repeats the value, which may be secret.
"""

from __future__ import annotations

import math
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, SecretStr

from pdproxy.core.allow import AllowList, is_address
from pdproxy.core.instance import Endpoint
from pdproxy.core.policy import POLICIES
from pdproxy.runtime.instances_arg import engine_at, expand

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
ON_NO_PREFILLER = ("fail", "decode-only")
TOKEN_IDS = ("auto", "always", "never")
LOG_FORMATS = ("text", "json")
MAX_PORT = 65_535

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([kmg]?i?b?)", re.ASCII | re.IGNORECASE)
# MB is decimal and MiB binary, as the standards say; a lone M is binary, as in nginx and Docker.
_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
}  # fmt: skip
_SWITCH = {"true": True, "yes": True, "on": True, "1": True}
_SWITCH |= {"false": False, "no": False, "off": False, "0": False}


def _whole(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value)
    return None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def read_port(value: object) -> int:
    """Read a TCP port."""
    port = _whole(value)
    if port is None or not 1 <= port <= MAX_PORT:
        raise ValueError(f"is not a port (1 to {MAX_PORT})")
    return port


def read_whole(value: object) -> int:
    """Read a whole number of any sign."""
    number = _whole(value)
    if number is None:
        raise ValueError("is not a whole number")
    return number


def read_amount(value: object) -> int:
    """Read a number of things of which there may be none."""
    number = read_whole(value)
    if number < 0:
        raise ValueError("is below 0")
    return number


def read_count(value: object) -> int:
    """Read a number of things of which there is at least one."""
    number = read_whole(value)
    if number < 1:
        raise ValueError("is below 1")
    return number


def read_attempts(value: object) -> int:
    """Read a number of attempts; there is always one, so 0 and less mean 1."""
    return max(1, read_whole(value))


def read_duration(value: object) -> float:
    """Read seconds, 0 included."""
    seconds = _number(value)
    if seconds is None or seconds < 0:
        raise ValueError("is not a number of seconds (0 or more)")
    return seconds


def read_positive_duration(value: object) -> float:
    """Read seconds, 0 excluded: nothing could ever be done in no time."""
    seconds = _number(value)
    if seconds is None or seconds <= 0:
        raise ValueError("is not a number of seconds above 0")
    return seconds


def read_size(value: object) -> int:
    """Read a size in bytes: 65536, "64KiB", "100MB", "1.5 GiB"."""
    size_bytes = _whole(value)
    if size_bytes is None and isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is not None and unit is not None:
            size = Decimal(match[1]) * unit
            size_bytes = int(size) if size == int(size) else None
    if size_bytes is None or size_bytes < 1:
        raise ValueError("is not a size (bytes above 0, or such as 64KiB, 100MB, 1GiB)")
    return size_bytes


def read_switch(value: object) -> bool:
    """Read true or false, in words too."""
    if isinstance(value, bool):
        return value
    found = _SWITCH.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise ValueError("is neither true nor false")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("is not text")  # pydantic collects ValueError only
    return value.strip()


def _one_of(value: object, choices: tuple[str, ...]) -> str:
    spelled = _text(value).lower().replace("-", "_")
    for choice in choices:
        if choice.lower().replace("-", "_") == spelled:
            return choice
    raise ValueError(f"is not one of {', '.join(choices)}")


def read_log_level(value: object) -> str:
    """Read a log level in any case."""
    return _one_of(value, LOG_LEVELS)


def read_log_format(value: object) -> str:
    """Read a log format in any case."""
    return _one_of(value, LOG_FORMATS)


def read_token_ids(value: object) -> str:
    """Read when token ids are asked for, in any case."""
    return _one_of(value, TOKEN_IDS)


def read_on_no_prefiller(value: object) -> str:
    """Read what happens without a prefiller; underscores do as well as dashes."""
    return _one_of(value, ON_NO_PREFILLER)


def read_policy(value: object) -> str:
    """Read the name of a routing policy; dashes do as well as underscores."""
    return _one_of(value, tuple(POLICIES))


def read_host(value: object) -> str:
    """Read a host name or address to listen on; an IPv6 one loses its brackets."""
    try:
        return Endpoint.of(_text(value), MAX_PORT).host
    except ValueError as error:
        raise ValueError("is not a host name or address") from error


def read_engine_host(value: object) -> str:
    """Read the host of an engine, such as `A`, `::1` or `https://A`."""
    try:
        engine_at(_text(value), MAX_PORT)
    except ValueError as error:
        raise ValueError("is not a host name or address") from error
    return _text(value)


def read_instances(value: object) -> str:
    """Read one short form of instances, such as `A:7100-7103`."""
    entry = _text(value)
    expand(entry)
    return entry


def read_allow_entry(value: object) -> str:
    """Read a network, an address or a name.

    Raises:
        ValueError: none of them.
    """
    text = str(value).strip()
    try:
        AllowList([text])
        if "/" not in text and not is_address(text):
            Endpoint.of(text, 1)
    except ValueError as error:
        raise ValueError(f"is not a network, an address or a name: {error}") from None
    return text


def read_secret(value: object) -> SecretStr:
    """Read a key that has to travel in a header: visible ASCII characters."""
    text = _text(value.get_secret_value() if isinstance(value, SecretStr) else value)
    if not text:
        raise ValueError("is empty")
    if not all("!" <= character <= "~" for character in text):
        raise ValueError("holds a space or a character that cannot travel in a header")
    return SecretStr(text)


def read_file(value: object) -> Path:
    """Read the path of a file that can be read now."""
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("is not the path of a file")
    # pathlib raises for names that are too long and folders that are closed; os.path answers no.
    if not os.path.isfile(value):
        raise ValueError("is not a file" if os.path.exists(value) else "does not exist")
    if not os.access(value, os.R_OK):
        raise ValueError("cannot be read: permission denied")
    return Path(value)


def read_key_file(path: Path) -> tuple[SecretStr, ...]:
    """Read the keys of a file: one a line, without empty lines and lines from `#` on.

    Raises:
        ValueError: the file cannot be read, holds no key, or a key that cannot be sent.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError("cannot be read as UTF-8 text") from error
    texts = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not texts:
        raise ValueError("holds no key")
    return tuple(read_secret(text) for text in texts)


def read_keyed_file(value: object) -> Path:
    """Read the path of a file of keys, and check the keys."""
    path = read_file(value)
    read_key_file(path)
    return path


Port = Annotated[int, BeforeValidator(read_port)]
Whole = Annotated[int, BeforeValidator(read_whole)]
Amount = Annotated[int, BeforeValidator(read_amount)]
Count = Annotated[int, BeforeValidator(read_count)]
Attempts = Annotated[int, BeforeValidator(read_attempts)]
Duration = Annotated[float, BeforeValidator(read_duration)]
PositiveDuration = Annotated[float, BeforeValidator(read_positive_duration)]
Size = Annotated[int, BeforeValidator(read_size)]
Switch = Annotated[bool, BeforeValidator(read_switch)]
LogLevel = Annotated[str, BeforeValidator(read_log_level)]
OnNoPrefiller = Annotated[str, BeforeValidator(read_on_no_prefiller)]
TokenIds = Annotated[str, BeforeValidator(read_token_ids)]
LogFormat = Annotated[str, BeforeValidator(read_log_format)]
PolicyName = Annotated[str, BeforeValidator(read_policy)]
Host = Annotated[str, BeforeValidator(read_host)]
EngineHost = Annotated[str, BeforeValidator(read_engine_host)]
Instances = Annotated[str, BeforeValidator(read_instances)]
AllowEntry = Annotated[str, BeforeValidator(read_allow_entry)]
Secret = Annotated[SecretStr, BeforeValidator(read_secret)]
KeyFile = Annotated[Path, BeforeValidator(read_keyed_file)]
File = Annotated[Path, BeforeValidator(read_file)]
