"""Hours and dates as owners write them."""

import pytest

from reclaimnet.apps.calendar import parse_maintenance
from reclaimnet.model.hours import parse_hours, show_hours
from reclaimnet.model.market import Hours, Terms
from reclaimnet.model.units import DAY, HOUR

MONDAY = 4 * DAY


def test_a_span_past_midnight_ends_on_the_next_day() -> None:
    terms = Terms(hours=parse_hours("mon-fri 18:00-08:00"))
    assert terms.lends_at(MONDAY + 19 * HOUR)
    assert terms.lends_at(MONDAY + DAY + 7 * HOUR)
    assert not terms.lends_at(MONDAY + 7 * HOUR)
    assert not terms.lends_at(MONDAY + DAY + 9 * HOUR)
    assert terms.lends_at(MONDAY + 5 * DAY + 7 * HOUR)
    assert not terms.lends_at(MONDAY + 5 * DAY + 19 * HOUR)


def test_days_may_be_listed_wrap_around_or_be_left_out() -> None:
    assert parse_hours("sat,sun 00:00-24:00") == (Hours(days=(5, 6), opens=0, closes=DAY),)
    assert parse_hours("fri-mon 1:00-2:00")[0].days == (0, 4, 5, 6)
    assert parse_hours("20:00-00:00") == (
        Hours(days=(0, 1, 2, 3, 4, 5, 6), opens=20 * HOUR, closes=DAY),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("monday 8:00-9:00", "expected mon, tue"),
        ("8:00", "mon-fri 18:00-08:00"),
        ("24:30-25:00", "00:00 to 24:00"),
        ("8:00-8:00", "same time"),
    ],
)
def test_hours_that_make_no_sense_are_refused_in_words(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_hours(text)


def test_maintenance_is_a_span_of_time() -> None:
    window = parse_maintenance("2026-11-20T08:00+00:00/2026-11-20T12:30+00:00")
    assert window.ends - window.begins == 4 * HOUR + HOUR // 2
    for wrong in ("2026-11-20 08:00", "2026-11-20 08:00/2026-11-19 08:00", "soon/later"):
        with pytest.raises(ValueError, match="expected FROM/TO"):
            parse_maintenance(wrong)


@pytest.mark.parametrize(
    "wrong", ["x", "", "2026-13-01 08:00", "2026-11-20 25:00", "0001-01-01 00:00+14:00"]
)
def test_what_is_no_date_is_named_and_nothing_of_python_is_said(wrong: str) -> None:
    good = "2026-11-20 08:00"
    for text in (f"{wrong}/{good}", f"{good}/{wrong}"):
        with pytest.raises(ValueError, match="is no date and time; expected FROM/TO") as refusal:
            parse_maintenance(text)
        assert str(refusal.value).startswith(f"{wrong!r} is no date")


@pytest.mark.parametrize(
    "text",
    [
        "mon-fri 18:00-08:00",
        "sat-sun 00:00-24:00",
        "mon,wed-thu 09:05-17:30",
        "mon-sun 20:00-24:00",
        "sun 22:00-06:00",
        "mon-sun 00:00-06:00",
    ],
)
def test_hours_are_shown_as_they_are_written(text: str) -> None:
    assert show_hours(parse_hours(text)) == text


def test_several_hours_are_shown_one_after_the_other() -> None:
    hours = parse_hours("mon-fri 18:00-08:00") + parse_hours("sat 10:00-12:00")
    shown = show_hours(hours)
    assert shown == "mon-fri 18:00-08:00, sat 10:00-12:00"
    assert Terms(hours=tuple(h for each in shown.split(", ") for h in parse_hours(each))) == Terms(
        hours=hours
    )
