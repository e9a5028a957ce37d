"""What the campus stores, under which names, and how much of it at most."""

from typing import Final

from nats.js.api import DiscardPolicy, PersistMode, StorageType, StreamConfig

from reclaimnet.model.units import DAY, KIB, MIB, SECOND
from reclaimnet.wire import MAX_MESSAGE_BYTES

LEAST_VERSION: Final = (2, 12, 0)
"""Of the server: 2.11 brought messages with a time to live, with which ended jobs are forgotten,
2.12 streams that need not reach the disk before they are acknowledged."""

KEPT_ENDED: Final = 30 * DAY
"""How long the record of an ended job is kept."""
KEPT_CARD: Final = 7 * DAY
"""A node that was not heard of for so long is forgotten."""
KEPT_JOURNAL: Final = 30 * DAY
KEPT_LOGS: Final = 30 * DAY
KEPT_ROLE: Final = DAY
"""Only tidies up roles nobody wants any more; a lapsed role is taken over long before."""
LOG_PIECES_PER_JOB: Final = 4096
"""The oldest output of a job goes first."""
LOG_PIECE_BYTES: Final = 64 * KIB

JOBS: Final = "KV_jobs"
NODES: Final = "KV_nodes"
ROLES: Final = "KV_roles"
JOURNAL: Final = "JOURNAL"
LOGS: Final = "LOGS"
BUNDLES: Final = "bundles"

_BYTES: Final = {
    JOBS: 512 * MIB,
    NODES: 64 * MIB,
    ROLES: 1 * MIB,
    JOURNAL: 1024 * MIB,
    LOGS: 2048 * MIB,
    BUNDLES: 4096 * MIB,
}
STORE_BYTES: Final = sum(_BYTES.values())
"""The server refuses a stream whose bound it could not honour, so it needs the sum."""


def all_streams(replicas: int) -> list[StreamConfig]:
    """What is promised (records, roles, bundles) is on disk before it is acknowledged, as the
    server's configuration says; what comes often and is only told may follow a moment later."""
    return [
        _latest(JOBS, "$KV.jobs.>", replicas, max_age_s=0, allow_msg_ttl=True),
        _latest(NODES, "$KV.nodes.>", replicas, max_age_s=KEPT_CARD / SECOND, relaxed=True),
        _latest(ROLES, "$KV.roles.>", replicas, max_age_s=KEPT_ROLE / SECOND),
        _history(JOURNAL, "journal.>", replicas, max_age_s=KEPT_JOURNAL / SECOND),
        _history(
            LOGS,
            "logs.>",
            replicas,
            max_age_s=KEPT_LOGS / SECOND,
            max_msgs_per_subject=LOG_PIECES_PER_JOB,
        ),
        StreamConfig(
            name=f"OBJ_{BUNDLES}",
            subjects=[f"$O.{BUNDLES}.C.>", f"$O.{BUNDLES}.M.>"],
            storage=StorageType.FILE,
            num_replicas=replicas,
            discard=DiscardPolicy.NEW,
            max_bytes=_BYTES[BUNDLES],
            allow_rollup_hdrs=True,
            allow_direct=True,
        ),
    ]


def _latest(
    name: str,
    subject: str,
    replicas: int,
    *,
    max_age_s: float,
    allow_msg_ttl: bool = False,
    relaxed: bool = False,
) -> StreamConfig:
    """A key-value bucket that keeps the newest value of each key; when full it takes no more."""
    return StreamConfig(
        name=name,
        subjects=[subject],
        storage=StorageType.FILE,
        num_replicas=replicas,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        max_msg_size=MAX_MESSAGE_BYTES,
        max_bytes=_BYTES[name],
        max_age=max_age_s,
        # A message that replaces all others of the stream is not for who may write one key of it.
        allow_rollup_hdrs=False,
        allow_direct=True,
        allow_msg_ttl=allow_msg_ttl or None,
        persist_mode=_relaxed(replicas) if relaxed else None,
    )


def _history(
    name: str, subject: str, replicas: int, *, max_age_s: float, max_msgs_per_subject: int = -1
) -> StreamConfig:
    """A stream that forgets its oldest messages."""
    return StreamConfig(
        name=name,
        subjects=[subject],
        storage=StorageType.FILE,
        num_replicas=replicas,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=max_msgs_per_subject,
        max_msg_size=MAX_MESSAGE_BYTES,
        max_bytes=_BYTES[name],
        max_age=max_age_s,
        persist_mode=_relaxed(replicas),
    )


def _relaxed(replicas: int) -> PersistMode | None:
    """Only for a single copy: several copies are safe in the others' memory."""
    return PersistMode.ASYNC if replicas == 1 else None
