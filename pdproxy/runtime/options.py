"""What one setting is called and how it is explained; read off the fields of `Settings`.

Rule: the command line, the environment, the file, `--help` and the documents all derive from the
one `Option` that stands at a setting's field, so they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar, cast

from pydantic import Field, JsonValue, SecretStr

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

T = TypeVar("T")

ENV_PREFIX = "PDPROXY_"
_SIMILARITY = 0.7  # a slip of the hand or two; less suggests names that nobody meant
_SHOWN_CHARACTERS = 80  # of what was written: enough to find it
_OPTION = "option"  # where a field keeps its Option


class Group(enum.StrEnum):
    """Headings of `--help`, in its order."""

    INSTANCES = "Instances"
    LISTENING = "Listening"
    ROUTING = "Routing"
    HEALTH = "Health"
    TIMEOUTS = "Timeouts"
    LIMITS = "Limits"
    SECURITY = "Security"
    LOGGING = "Logging"
    OTHER = "Other"


class Arity(enum.Enum):
    """How many values follow the flag."""

    NONE = enum.auto()
    ONE = enum.auto()
    MANY = enum.auto()  # a repeated flag replaces the earlier values, as argparse does
    GROWING = enum.auto()  # a repeated flag adds to the earlier values


class Origin(enum.StrEnum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    ENV = "env"
    FILE = "file"
    DEFAULT = "default"


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One setting as the operator sees it.

    Attributes:
        group: heading under which it is listed.
        metavar: stands for the value and names its unit; empty for a switch.
        help: unit, meaning and reason, without the default.
        name: the field's name; the flag is the same with dashes.
        default: the field's default.
        aliases: other names, also in the environment and in the file.
        separators: characters beside white space that part the values of a list in one string.
        sources: where it may be set.
        flag_name: the documented flag, if it is not named as the field.
        env_name: the variable, if it is not `PDPROXY_` and the name.
        example: a value for the commented line of a key that has no default.
    """

    group: Group
    metavar: str
    help: str
    name: str = ""
    default: object = None
    arity: Arity = Arity.ONE
    aliases: tuple[str, ...] = ()
    separators: str = ""
    sources: frozenset[Origin] = frozenset((Origin.FLAG, Origin.ENV, Origin.FILE))
    flag_name: str = ""
    env_name: str = ""
    example: str = ""

    @property
    def flag(self) -> str:
        """The flag as it is documented, such as `--log-level`."""
        return flag_of(self.flag_name or self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling of the flag, the documented one first."""
        names = dict.fromkeys((self.flag_name or self.name, self.name, *self.aliases))
        return tuple(map(flag_of, names))

    @property
    def variable(self) -> str:
        """The environment variable as it is documented."""
        return self.env_name or ENV_PREFIX + self.name.upper()

    @property
    def variables(self) -> tuple[str, ...]:
        """Every environment variable that sets it."""
        if self.env_name:
            return (self.env_name,)
        return tuple(ENV_PREFIX + name.upper() for name in (self.name, *self.aliases))

    @property
    def is_list(self) -> bool:
        """Whether it holds several values."""
        return self.arity in {Arity.MANY, Arity.GROWING}

    @property
    def is_secret(self) -> bool:
        """Whether its value is never shown."""
        return self.metavar in {"KEY", "TOKEN"}

    def split(self, value: object) -> list[object]:
        """Part a list that was written as one string; wrap a value that stands alone."""
        if isinstance(value, str):
            for separator in self.separators:
                value = value.replace(separator, " ")
            return list(value.split())
        return list(value) if isinstance(value, list | tuple) else [value]


def setting(default: T, option: Option) -> T:
    """Declare a field of a settings class: its default, and how the operator sees it.

    The return type is what a field specifier claims: the value that the field will have.
    """
    extra = cast("dict[str, JsonValue]", {_OPTION: option})
    return cast("T", Field(default, validate_default=True, json_schema_extra=extra))


def quoted(value: object) -> str:
    """Return what the operator wrote as Python shows it: one line, of bounded length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def named(name: str) -> str:
    """Return an unknown name as it was written if it is short and all visible, else quoted."""
    return name if name.isprintable() and len(name) <= _SHOWN_CHARACTERS else quoted(name)


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a complaint about an unknown name: the known one that is nearest."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILARITY)
    return f"; is {close[0]} meant?" if close else ""


def flag_of(name: str) -> str:
    """Return the flag for a field's name: `log_level` gives `--log-level`."""
    return "--" + name.replace("_", "-")


def options_of(settings: type[BaseSettings]) -> tuple[Option, ...]:
    """Return the options of a settings class, by group, then by field."""
    found: list[Option] = []
    for name, field in settings.model_fields.items():
        extra = field.json_schema_extra
        option: object = extra.get(_OPTION) if isinstance(extra, dict) else None
        if isinstance(option, Option):
            found.append(dataclasses.replace(option, name=name, default=field.default))
    order = tuple(Group)
    return tuple(sorted(found, key=lambda option: order.index(option.group)))


def from_source(options: Iterable[Option], source: Origin) -> tuple[Option, ...]:
    """Return the options that may be set through `source`."""
    return tuple(option for option in options if source in option.sources)


def shown(option: Option, value: object) -> str:
    """Return a value as TOML, sizes in their largest whole unit, secrets masked."""
    match value:
        case SecretStr():
            text = '"***"'
        case bool():
            text = str(value).lower()
        case int() if option.metavar == "BYTES":
            text = f'"{shown_size(value)}"'
        case int():
            text = str(value)
        case float():
            text = str(int(value)) if value.is_integer() else repr(value)
        case tuple():
            text = "[" + ", ".join(shown(option, item) for item in value) + "]"
        case _:
            text = _toml_string(str(value))
    return text


def shown_size(size_bytes: int) -> str:
    """Return a size in its largest whole binary unit: 65536 gives `64KiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes and size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


def _toml_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
