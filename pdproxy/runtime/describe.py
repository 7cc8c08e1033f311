"""The effective settings as TOML: what `--check-config` prints, and can read again.

Rule: secrets are masked, so a file made of it lacks them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.core.instance import Endpoint
from pdproxy.core.wording import counted
from pdproxy.runtime.options import Option, Origin, shown
from pdproxy.runtime.settings import OPTIONS, Settings


def describe(settings: Settings) -> str:
    """Return every setting with where it came from, secrets masked as `***`.

    What has no value, a secret, and what a file cannot set are comments.
    """
    lines: list[str] = []
    group = None
    for option in OPTIONS:
        if option.group is not group:
            group = option.group
            lines += ["", f"# {group}"]
        lines.append(_line(option, settings))
    lines += ["", *_instances("prefill", settings.prefill_endpoints)]
    lines += _instances("decode", settings.decode_endpoints)
    return "\n".join(lines[1:]) + "\n"


def _line(option: Option, settings: Settings) -> str:
    value: object = getattr(settings, option.name)
    origin = settings.origins.get(option.name, Origin.DEFAULT)
    if value is None:
        return f"# {option.name} is not set"
    is_comment = Origin.FILE not in option.sources or (option.is_secret and bool(value))
    return f"{'# ' if is_comment else ''}{option.name} = {shown(option, value)}  # {origin}"


def _instances(role: str, endpoints: tuple[Endpoint, ...]) -> Iterator[str]:
    names = f": {', '.join(map(str, endpoints))}" if endpoints else ""
    yield f"# {counted(len(endpoints), f'{role} instance')}{names}"
