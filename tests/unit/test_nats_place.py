"""Where a message stands in its stream, as servers of two generations say it."""

from reclaimnet.adapters.nats.follow import place_of


def test_both_forms_say_the_same() -> None:
    old = place_of("$JS.ACK.KV_jobs.reader.1.42.7.1700000000000000000.3")
    new = place_of("$JS.ACK._.ACCHASH.KV_jobs.reader.1.42.7.1700000000000000000.3.token")
    assert old == new == (42, 7, 1_700_000_000_000_000_000, 3)
