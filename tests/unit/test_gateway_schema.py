"""The schema promises no more and no less than the gateway takes."""

from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.apps.gateway import build
from reclaimnet.apps.gateway_desk import Submission
from reclaimnet.apps.gateway_nodes import HoursBody, LendBody, ReclaimBody, WithdrawBody

BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "pattern", "minimum", "maximum")


def bounds(schema: Any, path: str = "") -> dict[str, Any]:
    """Of every value that is not another body, by where it stands."""
    if not isinstance(schema, dict):
        return {}
    found = {f"{path} {key}": schema[key] for key in BOUNDS if key in schema}
    for word in ("anyOf", "oneOf"):
        for choice in schema.get(word, ()):
            found |= bounds(choice, path)
    for word in ("items", "additionalProperties"):
        found |= bounds(schema.get(word), f"{path}.{word}")
    for name, field in schema.get("properties", {}).items():
        found |= bounds(field, f"{path}.{name}")
    return found


@pytest.mark.parametrize("body", [HoursBody, LendBody, ReclaimBody, Submission, WithdrawBody])
def test_what_is_refused_is_told(body: type[msgspec.Struct]) -> None:
    app = build(create_autospec(Campus), "token")
    assert app.openapi_schema.components.schemas is not None
    told = app.openapi_schema.components.schemas[body.__name__].to_schema()
    _, components = msgspec.json.schema_components([body])
    kept = bounds(components[body.__name__])
    assert kept, "a body without any bound would be a mistake of its own"
    assert bounds(told) == kept
