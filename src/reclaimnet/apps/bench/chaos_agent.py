"""An agent of the chaos campus: the real one, with leases short enough for many rounds."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Final

from reclaimnet.adapters.gpu import find
from reclaimnet.apps import agent
from reclaimnet.engine.neighbourhood import Timing
from reclaimnet.model.asking import LendRequest
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import MILLISECOND, SECOND

TIMING: Final = Timing(
    beat=400 * MILLISECOND,
    lease=3 * SECOND,
    margin=SECOND,
    longest_wait=SECOND,
    role=2 * SECOND,
)
NOTICE: Final = 20 * SECOND


def main() -> int:
    folder, url, token_file, guard, address = sys.argv[1:]
    node = NodeId(Path(folder).name)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    settings = agent.Settings(
        node=node,
        folder=Path(folder),
        url=url,
        token=Path(token_file).read_text().strip(),
        gpus=find.declared(node, 1),
        host=address,
        lend=LendRequest(notice=NOTICE),
        timing=TIMING,
        guard=Path(guard),
    )
    return asyncio.run(agent.run(settings))


if __name__ == "__main__":
    sys.exit(main())
