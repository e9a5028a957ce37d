"""Durations and sizes as people write and read them."""

import pytest

from reclaimnet.model.units import (
    DAY,
    GIB,
    HOUR,
    MILLISECOND,
    MINUTE,
    SECOND,
    parse_duration,
    parse_size,
    show_age,
    show_count,
    show_duration,
    show_size,
)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("90", 90 * SECOND),
        ("0s", 0),
        ("1.5s", 1500 * MILLISECOND),
        ("250ms", 250 * MILLISECOND),
        ("10m", 10 * MINUTE),
        ("10min", 10 * MINUTE),
        ("1h30m", HOUR + 30 * MINUTE),
        ("2d", 2 * DAY),
        (" 5S ", 5 * SECOND),
    ],
)
def test_durations(text: str, duration: int) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "soon", "-5s", "5 s s", "1h 30", "5y", "ms"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 90s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("64k", 65536), ("24G", 24 * GIB), ("1.5GiB", 3 * GIB // 2)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_what_is_no_size_is_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match="512M"):
        parse_size("much")


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (250 * MILLISECOND, "250ms"),
        (12_300 * MILLISECOND, "12.3s"),
        (4 * MINUTE + 5 * SECOND, "4m05s"),
        (3 * HOUR + 20 * MINUTE, "3h20m"),
        (2 * DAY + 4 * HOUR, "2d04h"),
        (-5 * SECOND, "-5s"),
    ],
)
def test_durations_for_people(duration: int, text: str) -> None:
    assert show_duration(duration) == text


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512 B"), (65536, "64.0 KiB"), (3 * GIB // 2, "1.5 GiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert show_size(size) == text


def test_ages_are_whole_seconds_and_counts_agree_with_their_nouns() -> None:
    ages = (0, 900 * MILLISECOND, 6010 * MILLISECOND, 15_400 * MILLISECOND, 2 * MINUTE + SECOND)
    assert [show_age(age) for age in ages] == ["0s", "0s", "6s", "15s", "2m01s"]
    assert [show_count(n, "GPU") for n in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
