"""Bench `place --live`."""

from typing import Any


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    return {}


def render(result: dict[str, Any]) -> None:
    return None
