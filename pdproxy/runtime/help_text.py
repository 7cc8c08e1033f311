"""`--help`: every option under its heading, with its unit and its default."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pdproxy.runtime.command_line import EXTRA_OPTIONS
from pdproxy.runtime.options import Arity, Group, Option, Origin, from_source, shown
from pdproxy.runtime.settings import OPTIONS

WIDTH = 100
_INDENT = 34
_GLUE = "\N{NO-BREAK SPACE}"  # textwrap does not break there

_HEAD = """\
usage: pdproxy [--prefillers HOST:PORTS ...] [--decoders HOST:PORTS ...] [--option VALUE ...]

An OpenAI-compatible proxy for LLM engines with disaggregated prefill and decode.
"""
_TAIL = """\
Each setting may also be an environment variable (PDPROXY_ and its name, such as
PDPROXY_LOG_LEVEL) or a key of the --config file (such as log_level). A flag beats a variable,
a variable beats the file. Sizes are bytes, or such as 64KiB, 100MB, 1GiB.

Examples:
  pdproxy --host 0.0.0.0 --prefillers A:7100-7103 B:7100-7103 --decoders C:7100-7103 D:7100-7103
  pdproxy --prefiller-hosts A A B --prefiller-ports 7100 7101 7100 \\
          --decoder-hosts C D --decoder-ports 7100 7100
"""


def help_text() -> str:
    """Return the whole text, lines of at most `WIDTH` characters."""
    options = (*from_source(OPTIONS, Origin.FLAG), *EXTRA_OPTIONS)
    blocks = [_HEAD]
    for group in Group:
        entries = [_entry(option) for option in options if option.group is group]
        blocks.append("\n".join([f"{group}:", *entries, ""]))
    return "\n".join([*blocks, _TAIL])


def shown_default(option: Option) -> str:
    """Return a default for people: `5 s`, `64KiB`, `none`."""
    if option.default is None or option.default == ():
        return "none"
    if option.arity is Arity.NONE:
        return "off"
    text = shown(option, option.default).strip('"')
    return f"{text} s" if option.metavar == "SECONDS" else text


def shown_usage(option: Option) -> str:
    """Return the flag with what follows it: `--prefillers HOST:PORTS ...`."""
    short = "-h, " if option.name == "help" else ""
    dots = " ..." if option.is_list else ""
    return f"{short}{option.flag} {option.metavar}{dots}".rstrip()


def _entry(option: Option) -> str:
    default = "" if option in EXTRA_OPTIONS else f"(default: {shown_default(option)})"
    left = f"  {shown_usage(option)}"
    text = list(_wrapped(f"{option.help} {default.replace(' ', _GLUE)}"))
    if len(left) < _INDENT - 1:
        first, *rest = text
        return "\n".join([left.ljust(_INDENT) + first, *(" " * _INDENT + line for line in rest)])
    return "\n".join([left, *(" " * _INDENT + line for line in text)])


def _wrapped(text: str) -> Iterator[str]:
    width = WIDTH - _INDENT
    for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        yield line.replace(_GLUE, " ")
