"""The page as it is served: its files say what they are."""

import pytest
from litestar.testing import TestClient

from reclaimnet.apps import gateway_page
from reclaimnet.apps.gateway_http import application


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html; charset=utf-8"), ("/web/charts.js", "text/javascript; charset=utf-8")],
)
def test_a_file_says_once_how_its_text_is_written(path: str, kind: str) -> None:
    with TestClient(application(gateway_page.handlers(), guards=[], state={})) as client:
        assert client.get(path).headers["content-type"] == kind
