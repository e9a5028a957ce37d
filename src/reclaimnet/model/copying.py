"""Copies of frozen values that differ in a few fields, for those that change all the time."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def copier(kind: type[T]) -> Callable[[T, dict[str, Any]], T]:
    """As dataclasses.replace for values of this kind, at a tenth of its cost; that takes a kind
    without slots, since a dictionary is copied as a whole, and one that `value` makes, since a
    frozen one refuses it."""
    count = len(fields(kind))  # type: ignore[arg-type]

    def but(value: T, changes: dict[str, Any]) -> T:
        changed = object.__new__(kind)
        changed.__dict__ = fields_of = value.__dict__ | changes
        assert len(fields_of) == count, f"{kind.__name__} has not all of {tuple(changes)}"
        return changed

    return but
