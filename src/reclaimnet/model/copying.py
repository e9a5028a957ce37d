"""Copies of frozen values that differ in a few fields, for those that change all the time."""

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from operator import attrgetter
from typing import Any, ClassVar, Protocol, TypeVar


class _Slotted(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=_Slotted)


def copier(kind: type[T]) -> Callable[[T, Mapping[str, Any]], T]:
    """As dataclasses.replace for values of this kind, which has slots, at half its cost or less."""
    # How each field's slot is filled, past the refusal of a frozen object.
    put = {each.name: getattr(kind, each.name).__set__ for each in fields(kind)}
    puts, values = tuple(put.values()), attrgetter(*put)

    def but(value: T, changes: Mapping[str, Any]) -> T:
        changed = object.__new__(kind)
        for fill, old in zip(puts, values(value), strict=True):
            fill(changed, old)
        for name, new in changes.items():
            put[name](changed, new)
        return changed

    return but
