"""Where settings come from: flag > environment > TOML file > default, and every fault at once.

Rule: a fault names what the operator wrote (the flag, the variable, or the file and its key), and
never the value of a secret.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence

from pydantic import ValidationError

from pdproxy.errors import ConfigError
from pdproxy.runtime.command_line import read_command_line
from pdproxy.runtime.cross_checks import Inconsistent
from pdproxy.runtime.options import (
    ENV_PREFIX,
    Arity,
    Option,
    Origin,
    flag_of,
    from_source,
    hint,
    named,
    quoted,
)
from pdproxy.runtime.settings import OPTIONS, Settings

# What a role's instances are is one setting with two spellings: either from a stronger source
# replaces both from a weaker one.
_SPELLINGS = (
    frozenset(("prefillers", "prefiller_hosts", "prefiller_ports")),
    frozenset(("decoders", "decoder_hosts", "decoder_ports")),
)
# Kubernetes and Docker describe a service called "pdproxy..." to every container by variables of
# these forms (kubernetes.io, "Environment variables"); they are none of ours.
_SERVICE_VARIABLE = re.compile(
    r"PDPROXY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)",
    re.ASCII,
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://[^ ]+:\d+", re.ASCII)

_BY_NAME = {option.name: option for option in OPTIONS}


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """The values of one source.

    Attributes:
        values: by setting, lists as lists.
        labels: by setting, how a fault names it.
        faults: what is wrong with the source itself.
    """

    origin: Origin
    values: dict[str, object] = dataclasses.field(default_factory=dict)
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)

    def put(self, option: Option, label: str, value: object) -> None:
        """Store one value; a second one for the same setting is a fault."""
        if option.name in self.values:
            self.faults.append(f"{label}: {self.labels[option.name]} is set too; keep one")
            return
        self.values[option.name] = option.split(value) if option.is_list else value
        self.labels[option.name] = label


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings for a command line (without the program's name) and an environment.

    Raises:
        ConfigError: with a line for every fault.
    """
    layers = [_flag_layer(argv), _environment_layer(environ)]
    path = next((layer.values["config"] for layer in layers if "config" in layer.values), None)
    if isinstance(path, str):
        layers.append(_file_layer(path))
    merged = _merge(layers)
    merged.values["reread"] = functools.partial(load_settings, tuple(argv), dict(environ))
    faults = [fault for layer in layers for fault in layer.faults]
    settings, more = _validate(merged)
    if settings is None or faults:
        raise ConfigError([*faults, *more])
    return settings


def _flag_layer(argv: Sequence[str]) -> Layer:
    command = read_command_line(argv, OPTIONS)
    values = {name: value for name, value in command.values.items() if name in _BY_NAME}
    return Layer(Origin.FLAG, values, command.flags, command.faults)


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    """Read our variables; an empty one counts as unset, as compose files leave them."""
    layer = Layer(Origin.ENV)
    known = {
        variable: option
        for option in from_source(OPTIONS, Origin.ENV)
        for variable in option.variables
    }
    for variable in sorted(environ):
        value = environ[variable]
        if option := known.get(variable):
            if value.strip() and not _is_of_service(variable, value):
                layer.put(option, variable, value)
        elif variable.startswith(ENV_PREFIX) and not _is_of_service(variable, value):
            layer.faults.append(f"{named(variable)}: unknown variable{hint(variable, known)}")
    return layer


def _is_of_service(variable: str, value: str) -> bool:
    is_ours = variable.startswith(ENV_PREFIX)
    is_address = is_ours and _SERVICE_ADDRESS.fullmatch(value) is not None
    return is_address or _SERVICE_VARIABLE.fullmatch(variable) is not None


def _file_layer(path: str) -> Layer:
    """Read a TOML file; whether it exists is checked with the option that names it."""
    layer = Layer(Origin.FILE)
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError:
        return layer
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        layer.faults.append(f"{path}: is not TOML: {error}")
        return layer
    known = {
        name: option
        for option in from_source(OPTIONS, Origin.FILE)
        for name in (option.name, *option.aliases)
    }
    for key, value in content.items():
        if option := known.get(key.replace("-", "_")):
            layer.put(option, f"{path}: {key}", value)
        else:
            layer.faults.append(f"{path}: {named(key)}: unknown key{hint(key, known)}")
    return layer


def _merge(layers: Sequence[Layer]) -> Layer:
    """Lay weaker values under stronger ones."""
    merged = Layer(Origin.DEFAULT)
    origins: dict[str, Origin] = {}
    for layer in layers:
        taken = set(merged.values)
        taken.update(*(forms for forms in _SPELLINGS if forms & taken))
        for name in [name for name in layer.values if name not in taken]:
            merged.values[name] = layer.values[name]
            merged.labels[name] = layer.labels[name]
            origins[name] = layer.origin
    merged.values["origins"] = origins
    return merged


def _validate(merged: Layer) -> tuple[Settings | None, list[str]]:
    try:
        return Settings.model_validate(merged.values), []
    except ValidationError as error:
        wrong = error
    faulty = {_field(item["loc"]) for item in wrong.errors() if item["loc"]}
    lines = list(_fault_lines(wrong, merged, faulty))
    if faulty:
        # Faults between settings show only once each is right by itself.
        rest = {name: value for name, value in merged.values.items() if name not in faulty}
        try:
            Settings.model_validate(rest)
        except ValidationError as error:
            lines.extend(_fault_lines(error, merged, faulty))
    return None, lines


def _fault_lines(error: ValidationError, merged: Layer, faulty: set[str]) -> Iterator[str]:
    places = {name: place for place, name in enumerate(merged.values)}
    for item in sorted(error.errors(), key=lambda item: places.get(_field(item["loc"]), 0)):
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, Inconsistent):
            for fault in cause.faults:
                if not faulty.intersection(fault.fields):
                    yield f"{_label(fault.fields[0], merged)}: {fault.text}"
            continue
        name = _field(item["loc"])
        text = str(cause) if isinstance(cause, ValueError) else f"is wrong: {item['msg']}"
        yield f"{_label(name, merged)}: {_subject(item['loc'], merged)} {text}"


def _field(location: Sequence[int | str]) -> str:
    return str(location[0]) if location else ""


def _label(name: str, merged: Layer) -> str:
    return merged.labels.get(name, flag_of(name))


def _subject(location: Sequence[int | str], merged: Layer) -> str:
    """Return what a fault is about: `'x'`, or `value 2 of 3 ('x')` in a list."""
    option = _BY_NAME[_field(location)]
    value = merged.values.get(option.name)
    if not option.is_list or not isinstance(value, list):
        return _quoted(option, value)
    match location:
        case (_, int(index), *_):
            return f"value {index + 1} of {len(value)} ({_quoted(option, value[index])})"
        case _:
            return "the list"


def _quoted(option: Option, value: object) -> str:
    if option.is_secret:
        return "the secret"
    if option.arity is Arity.NONE and value is True:
        return "the switch"
    return quoted(value)
