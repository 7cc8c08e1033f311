"""Command line -> values by setting, all faults collected; nothing is interpreted but the flags.

Rule: what argparse reads, this reads alike: `--flag value`, `--flag=value`, lists up to the next
flag, the last of repeated flags, unambiguous beginnings of flags, negative numbers as values. It
differs in that it goes on after a fault.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from pdproxy.runtime.options import Arity, Group, Option, Origin, from_source, hint, named, quoted

HELP = Option(Group.OTHER, "", "show this text and exit", name="help", arity=Arity.NONE)
VERSION = Option(Group.OTHER, "", "show the version and exit", name="version", arity=Arity.NONE)
EXTRA_OPTIONS = (HELP, VERSION)

# The flags of vllm-ascend's example proxy. A beginning that is unambiguous among them stays so,
# because launch scripts may hold it.
REFERENCE_FLAGS = frozenset(
    (
        "help", "port", "host", "prefiller_hosts", "prefiller_ports", "decoder_hosts",
        "decoder_ports", "max_retries", "retry_delay", "max_waiting_retries",
        "waiting_retry_interval", "workers", "log_level",
    )
)  # fmt: skip

_NEGATIVE_NUMBER = re.compile(r"-[0-9.]+(?:[eE][+-]?[0-9]+)?", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class CommandLine:
    """What was typed.

    Attributes:
        values: by setting: a string, a list of strings, or True for a switch that stands alone.
        flags: by setting: the flag as typed, beginnings completed.
        faults: a line for each.
    """

    values: dict[str, object] = dataclasses.field(default_factory=dict)
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)

    def asks(self, option: Option) -> bool:
        """Tell whether a switch such as `HELP` was given."""
        return option.name in self.values

    def put(self, option: Option, flag: str, values: list[str]) -> None:
        """Store the values of one flag; note a missing one."""
        self.flags[option.name] = flag
        match option.arity:
            case Arity.NONE:
                self.values[option.name] = values[-1] if values else True
            case _ if not values:
                self.faults.append(f"{flag}: no value, where {option.metavar} is expected")
            case Arity.ONE:
                self.values[option.name] = values[-1]
            case Arity.MANY:
                self.values[option.name] = values
            case Arity.GROWING:
                known = self.values.get(option.name)
                self.values[option.name] = [*(known if isinstance(known, list) else ()), *values]


def read_command_line(argv: Sequence[str], options: Iterable[Option]) -> CommandLine:
    """Read `argv`, the program's name not included."""
    by_flag = {
        flag: option
        for option in (*from_source(options, Origin.FLAG), *EXTRA_OPTIONS)
        for flag in option.flags
    } | {"-h": HELP}
    command = CommandLine()
    position = 0
    is_secret = False
    while position < len(argv):
        typed, equals, attached = argv[position].partition("=")
        if not _is_flag(argv[position]):
            stray = "" if is_secret else f" ({quoted(argv[position])})"
            command.faults.append(f"argument {position + 1}{stray} follows no option")
            position += 1
            continue
        try:
            flag = _complete(typed, by_flag)
        except LookupError as error:
            command.faults.append(f"argument {position + 1}: {error.args[0]}")
            position = _end_of_values(argv, position + 1)
            continue
        option = by_flag[flag]
        end = _end_of_option(argv, position, option, bool(equals))
        command.put(option, flag, [attached] if equals else list(argv[position + 1 : end]))
        position, is_secret = end, option.is_secret
    return command


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument != "-" and not _NEGATIVE_NUMBER.fullmatch(argument)


def _end_of_values(argv: Sequence[str], start: int) -> int:
    return next((i for i in range(start, len(argv)) if _is_flag(argv[i])), len(argv))


def _end_of_option(argv: Sequence[str], position: int, option: Option, is_attached: bool) -> int:
    if is_attached or option.arity is Arity.NONE:
        return position + 1
    end = _end_of_values(argv, position + 1)
    return min(end, position + 2) if option.arity is Arity.ONE else end


def _complete(typed: str, by_flag: dict[str, Option]) -> str:
    """Return the flag that `typed` is or begins.

    Raises:
        LookupError: it is the beginning of none or of several; the first argument says so.
    """
    if typed in by_flag:
        return typed
    found = {
        option.name: option.flag
        for flag, option in by_flag.items()
        if typed.startswith("--") and len(typed) > len("--") and flag.startswith(typed)
    }
    if len(found) > 1:
        established = {name: flag for name, flag in found.items() if name in REFERENCE_FLAGS}
        found = established if len(established) == 1 else found
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise LookupError(f"{typed} may mean {', '.join(sorted(found.values()))}")
    near = hint(typed.replace("_", "-"), by_flag)
    raise LookupError(f"unknown option {named(typed)}{near}")
