"""Names of nodes, people and zones: what one is made of, and what is said of one that is not."""

import re
from typing import Final

MAX_NAME: Final = 63
"""Characters: a label of a host's name has no more."""
SHOWN: Final = 40
"""Characters of a name that cannot be: enough to know which one was meant."""
NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")


def cannot_be(name: str, whose: str) -> str:
    """One sentence; whose is "a node" or the like."""
    long = len(name) > MAX_NAME
    shown = f"{f'{name[:SHOWN]}...'!r} ({len(name)} characters)" if long else repr(name)
    return (
        f"{shown} cannot be {whose}'s name; use 1 to {MAX_NAME} characters, of letters (a-z, A-Z), "
        "digits, and after the first also any of ._-"
    )
