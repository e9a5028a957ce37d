"""`rn bench NAME`: each bench is a module here with `run` and `render`; this finds and calls it."""

import importlib
import inspect
import json as jsonlib
import logging
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reclaimnet.apps import bench
from reclaimnet.apps.config import did_you_mean
from reclaimnet.apps.own_command import to_the_end
from reclaimnet.errors import Unavailable, UsageError


def names() -> list[str]:
    """Every bench there is."""
    found = [module.name for module in pkgutil.iter_modules(bench.__path__)]
    return sorted(name for name in found if "_" not in name and name != "registry")


def check(name: str) -> None:
    """Raises UsageError if there is no such bench."""
    if name not in names():
        raise UsageError(f"there is no bench {name}{did_you_mean(name, names())}")


def run(name: str, *, json: bool, seed: int, quick: bool, trace: Path | None, live: bool) -> int:
    """What only some benches take, a trace or real agents, is refused for the others."""
    check(name)
    try:
        module = importlib.import_module(f"{bench.__name__}.{name}")
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"this bench needs the package {error.name}, which is not installed; run it as ./rn "
            "in a checkout, which installs it"
        ) from error
    # It warns of every TLS connection that ends.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    measure: Callable[..., dict[str, Any]] = module.run
    taken = inspect.signature(measure).parameters
    given = {"trace": trace, "live": live}
    for option, value in given.items():
        if value and option not in taken:
            raise UsageError(f"bench {name} takes no --{option}; leave it out")
    more = {option: value for option, value in given.items() if option in taken}
    with to_the_end():
        result = measure(seed=seed, quick=quick, **more)
    if json:
        print(jsonlib.dumps(result))  # noqa: T201
    else:
        module.render(result)
    return 0
