"""Tables on standard output are cut for a terminal's sake only."""

import pytest
from rich.table import Table

from reclaimnet.apps import printing


@pytest.mark.parametrize("told", [None, "60"])
def test_a_table_in_a_file_is_whole_unless_a_width_was_asked_for(
    told: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if told is not None:
        monkeypatch.setenv("COLUMNS", told)
    names = [f"static_lead({number}h)" for number in range(10)]
    printing.console().print(Table(*names))
    out, _ = capfd.readouterr()
    assert all(name in out for name in names) == (told is None)
    assert "…" not in out or told is not None
    assert max(map(len, out.splitlines())) <= (60 if told else printing.WIDE)
