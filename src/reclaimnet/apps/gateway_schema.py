"""What the gateway's schema tells of its texts."""

from litestar._openapi.schema_generation import SchemaCreator
from litestar.openapi.spec import OpenAPIType, Schema
from litestar.plugins import OpenAPISchemaPlugin
from litestar.typing import FieldDefinition
from msgspec import Meta


class TextBounds(OpenAPISchemaPlugin):
    """Litestar tells how long the text in a field may be, but not the texts in a list."""

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        return field_definition.annotation is str and bool(_metas(field_definition))

    def to_openapi_schema(
        self, field_definition: FieldDefinition, schema_creator: SchemaCreator
    ) -> Schema:
        schema = Schema(type=OpenAPIType.STRING)
        for meta in _metas(field_definition):
            schema.min_length = meta.min_length
            schema.max_length = meta.max_length
            schema.pattern = meta.pattern
        return schema


def _metas(field: FieldDefinition) -> list[Meta]:
    return [meta for meta in field.metadata if isinstance(meta, Meta)]
