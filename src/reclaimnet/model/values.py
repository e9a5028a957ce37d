"""Values: dataclasses that are frozen for mypy, and cost no more to make than plain ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, **options: Any) -> Callable[[type[T]], type[T]]:
        """As `dataclass`, for what is made for every event: while the program runs, nothing
        watches over each field of it. That would be half of what it takes to make one."""
        return dataclass(unsafe_hash=frozen, **options)


__all__ = ["value"]
