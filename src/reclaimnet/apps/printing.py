"""Standard output for tables: as wide as the terminal, or wide enough where there is none."""

import os
import sys
from typing import Final

from rich.console import Console

WIDE: Final = 250
"""Columns in a pipe or a file: no table of ours needs more, and none is cut to somebody's 80."""


def console() -> Console:
    free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=WIDE if free else None)
