"""Which zone takes a job, and how much one lends to the others."""

import pytest

from reclaimnet.policy.split import by_residual, by_weight, spare


def test_a_zone_is_chosen_as_often_as_it_has_room() -> None:
    draws = [by_residual((30, 0, -5, 10), 2, (i + 0.5) / 400) for i in range(400)]
    assert [draws.count(zone) for zone in range(4)] == [300, 0, 0, 100]


def test_a_full_campus_leaves_a_job_where_it_is() -> None:
    assert by_residual((0, -3, -1), 1, 0.7) == 1


@pytest.mark.parametrize("u", [0.0, 0.5, 0.999999999])
def test_who_has_no_weight_is_never_chosen(u: float) -> None:
    assert by_weight((0, 7, 0), u) == 1


def test_half_of_what_is_too_much_is_lent_and_nobody_lends_what_it_lacks() -> None:
    residual = (20, 0, -8)
    assert [spare(residual, zone) for zone in range(3)] == [8, 0, 0]
