"""Logins survive being copied, and what is none is said to be none."""

import pytest

from reclaimnet.adapters.nats.access import CAMPUS_HOST
from reclaimnet.apps.client import CAMPUS_NAME, known_by
from reclaimnet.apps.login import Login, read_login
from reclaimnet.errors import BadConfig, UsageError


@pytest.mark.parametrize("ca", [None, "PEM\n"])
def test_a_login_survives_being_copied(ca: str | None) -> None:
    login = Login(url="https://x:1", token="ada.secret", ca=ca)
    assert read_login(f"  {login}\n") == login


@pytest.mark.parametrize("text", ["", "rnl1.", "rnl1.%%%", "ada.secret", "rnl1." + "A" * 9000])
def test_what_is_no_login_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UsageError):
        read_login(text)


@pytest.mark.parametrize("text", ["", "nonsense", "-----BEGIN CERTIFICATE-----\n!\n"])
def test_an_authority_that_cannot_be_read_trusts_nobody(text: str) -> None:
    with pytest.raises(BadConfig, match="cannot be read"):
        known_by(text)


def test_commands_expect_the_name_that_the_campus_proves() -> None:
    assert CAMPUS_NAME == CAMPUS_HOST
