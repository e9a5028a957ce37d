"""The tree of errors: what can go wrong outside of us, each with a sentence for people.

ReclaimNetError
├── UsageError          the person asked for something that cannot be        exit 2
├── Unavailable         the campus, an agent or a server does not answer     exit 69
├── NotFound            no such job, node, GPU or file                       exit 66
├── Forbidden           not theirs to ask for                                exit 77
├── BadConfig           a configuration or scenario file is wrong            exit 78
├── VaultFull           no room left for a checkpoint                        exit 73
└── Damaged             bytes are not what was saved                         exit 65
"""

from typing import ClassVar


class ReclaimNetError(Exception):
    """Its text is one sentence that says what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(ReclaimNetError):
    exit_code = 2


class Unavailable(ReclaimNetError):
    exit_code = 69


class NotFound(ReclaimNetError):
    exit_code = 66


class Forbidden(ReclaimNetError):
    exit_code = 77


class BadConfig(ReclaimNetError):
    exit_code = 78


class VaultFull(ReclaimNetError):
    exit_code = 73


class Damaged(ReclaimNetError):
    exit_code = 65
