"""What a training script imports: `from reclaimnet import sdk`, then `with sdk.job() as job:`.

It needs the standard library only, and works outside of ReclaimNet just as well: there `restore`
gives back the default and `step` does nothing.
"""

from reclaimnet.sdk.job import Job, Notice, job

__all__ = ["Job", "Notice", "job"]
