"""`rn bench NAME`: each bench is a module here with `run` and `render`; this finds and calls it."""

import importlib
import json as jsonlib
import logging
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reclaimnet.apps import bench
from reclaimnet.apps.config import did_you_mean
from reclaimnet.errors import Unavailable, UsageError


def names() -> list[str]:
    """Every bench there is."""
    found = [module.name for module in pkgutil.iter_modules(bench.__path__)]
    return sorted(name for name in found if "_" not in name and name != "registry")


def run(
    name: str, *, json: bool, seed: int, quick: bool, trace: Path | None, **more: object
) -> int:
    """`more` are options of one bench only; a bench that does not know one says so."""
    if name not in names():
        raise UsageError(f"there is no bench {name}{did_you_mean(name, names())}")
    try:
        module = importlib.import_module(f"{bench.__name__}.{name}")
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"this bench needs the package {error.name}, which is not installed; run it as ./rn "
            "in a checkout, which installs it"
        ) from error
    # It warns of every TLS connection that ends.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    given = {key: value for key, value in more.items() if value}
    measure: Callable[..., dict[str, Any]] = module.run
    try:
        result = measure(seed=seed, quick=quick, trace=trace, **given)
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise UsageError(f"bench {name} takes no --{'/--'.join(given)}") from error
        raise
    if json:
        print(jsonlib.dumps(result))  # noqa: T201
    else:
        module.render(result)
    return 0
