"""What the gateway's schema tells that the framework does not find out by itself."""

from http import HTTPStatus

import msgspec
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIType, Schema
from litestar.plugins import OpenAPISchemaPlugin
from litestar.typing import FieldDefinition
from msgspec import Meta


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str
    """One sentence that says what to do."""


def may_fail(*statuses: int) -> dict[int, ResponseSpec]:
    """What a handler may answer besides what it should, for the schema."""
    return {
        status: ResponseSpec(
            Problem,
            description=HTTPStatus(status).phrase,
            media_type="application/problem+json",
            generate_examples=False,
        )
        for status in (*statuses, 401, 503)
    }


def found(kind: type) -> ResponseSpec:
    """Without examples: those that are made at random may be none of the kind."""
    return ResponseSpec(kind, generate_examples=False)


class TextBounds(OpenAPISchemaPlugin):
    """Litestar tells how long the text in a field may be, but not the texts in a list."""

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        return field_definition.annotation is str and bool(_metas(field_definition))

    def to_openapi_schema(
        self, field_definition: FieldDefinition, schema_creator: object
    ) -> Schema:
        schema = Schema(type=OpenAPIType.STRING)
        for meta in _metas(field_definition):
            schema.min_length = meta.min_length
            schema.max_length = meta.max_length
            schema.pattern = meta.pattern
        return schema


def _metas(field: FieldDefinition) -> list[Meta]:
    return [meta for meta in field.metadata if isinstance(meta, Meta)]
