"""The command `pdproxy`: read what was typed, check it, run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pdproxy import __version__
from pdproxy.errors import ConfigError
from pdproxy.runtime.command_line import HELP, VERSION, read_command_line
from pdproxy.runtime.describe import describe
from pdproxy.runtime.help_text import help_text
from pdproxy.runtime.settings import OPTIONS, Settings
from pdproxy.runtime.sources import load_settings

EXIT_USAGE = 2  # what argparse and most commands end with on a wrong command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; `argv` is without the program's name."""
    arguments = sys.argv[1:] if argv is None else argv
    command = read_command_line(arguments, OPTIONS)
    if command.asks(HELP):
        sys.stdout.write(help_text())
        return 0
    if command.asks(VERSION):
        sys.stdout.write(f"pdproxy {__version__}\n")
        return 0
    try:
        return _run(load_settings(arguments, os.environ))
    except ConfigError as error:
        sys.stderr.writelines(f"pdproxy: {fault}\n" for fault in error.faults)
        return EXIT_USAGE


def _run(settings: Settings) -> int:
    if settings.check_config:
        sys.stdout.write(describe(settings))
        sys.stderr.writelines(f"pdproxy: warning: {text}\n" for text in settings.warnings)
        return 0
    # The server's modules are loaded only here, so that checking a configuration stays quick.
    if settings.demo:
        from pdproxy.runtime import demo

        return demo.run(settings)
    if settings.worker_count > 1:
        from pdproxy.runtime import supervisor

        return supervisor.run(settings)
    from pdproxy.runtime import worker

    return worker.run(settings)
