"""The store of a bench's campus, seen with the gateway's own rights: to count what is in it."""

import contextlib
import json
from collections.abc import AsyncIterator

from reclaimnet.adapters.nats.access import Key
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.tls import ca
from reclaimnet.apps.config import Config
from reclaimnet.wire import GATEWAY


@contextlib.asynccontextmanager
async def as_gateway(config: Config) -> AsyncIterator[Campus]:
    state = config.state
    campus = await Campus.connect(
        json.loads((state / "campus.json").read_text())["nats_url"],
        Key(name=GATEWAY, seed=(state / "gateway.key").read_text()),
        GATEWAY,
        tls=ca.server_known_by((state / "ca" / "ca.crt").read_text()),
        prepare=False,
    )
    try:
        yield campus
    finally:
        await campus.close()
