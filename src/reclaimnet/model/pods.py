"""Pods: a Kubernetes cluster, as far as rhythms and loans are concerned."""

from dataclasses import dataclass, field
from typing import Any, Final

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link
from reclaimnet.model.rhythm import Burst, Hold

GROUP: Final = "reclaimnet.io"
VERSION: Final = "v1alpha1"

RHYTHM: Final = f"{GROUP}/rhythm"
"""Annotation of a pod: the name of a Rhythm in its namespace, or the rhythm itself."""
JOB: Final = f"{GROUP}/job"
"""Pods of one job talk at the same time, and are shifted together; otherwise each is its own."""
LEND: Final = f"{GROUP}/lend"
"""Annotation of a pod that runs an agent: "true" lends its GPUs to the campus pool, anything else
takes them back."""
NOTICE: Final = f"{GROUP}/notice"
"""Annotation that the controller puts on a lent pod whose guests were told to leave, and why."""
SAID: Final = f"{GROUP}/said"
"""Annotation that the controller puts on such a pod: when it told the agent so, by the agent's own
clock. If anybody has spoken to the agent since, that was its owner, whose word it leaves alone."""
ROTATION: Final = f"{GROUP}/rotation"
"""Annotation that the controller puts on a pod: when its iterations are to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """A rhythm as declared: whose it is and which links it meets is seen from the pods."""

    period: int
    bursts: tuple[Burst, ...]
    hold: Hold = Hold.SDK


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    namespace: str
    name: str
    uid: str
    job: JobId
    address: str = ""
    """Which no pod can choose; empty until it runs."""
    node: str | None = None
    """None until the scheduler has bound it."""
    phase: str = "Pending"
    priority: int = 0
    """The value of its priority class, which is our priority as it stands: higher goes first."""
    rhythm: str = ""
    """Its annotation; empty if it has none."""
    lends: bool | None = None
    """Whether the GPUs of the agent in it are lent: None if nobody has said, False to end it."""
    notice: str = ""
    said: int = 0
    rotation: str = ""
    grace: int = 0
    """Nanoseconds between being told to end and being ended."""
    leaves_at: int | None = None
    """When it will be ended; None if nobody has deleted or evicted it."""
    unschedulable: bool = False
    """The scheduler has tried, and found no node."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeNode:
    name: str
    labels: dict[str, str] = field(default_factory=dict)
    cordoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLink:
    """A Link of the cluster, and whose traffic goes over it."""

    link: Link
    labels: dict[str, str] = field(default_factory=dict)
    """It is the link of all nodes that have these; empty means of all."""
    generation: int = 0
    status: dict[str, Any] = field(default_factory=dict)

    def carries(self, node: KubeNode) -> bool:
        return all(node.labels.get(name) == value for name, value in self.labels.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTune:
    """A Rhythm of the cluster, which pods of its namespace refer to by name."""

    namespace: str
    name: str
    tune: Tune | None
    wrong: str = ""
    """Why there is no tune."""
    generation: int = 0
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"
