"""What `millrace models add` takes for an endpoint."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from millrace.cli import app
from tests.unit.conftest import Checkout


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://u:s3cret@host/v1",
        "https://host/v1?key=s3cret",
        "https://s3cret@host/v1",
        "host/s3cret",
        "https://[s3cret",
    ],
)
def test_an_endpoint_with_a_key_in_its_url_is_refused_before_a_table_or_a_plan_holds_it(
    checkout: Checkout, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(checkout.home))
    monkeypatch.setenv("MILLRACE_CONFIG_DB", checkout.settings.require_config_db())
    result = CliRunner().invoke(app, ["models", "add", "api", "--endpoint", endpoint])
    assert result.exit_code == 2, result.output
    assert "--endpoint" in result.output and "s3cret" not in result.output
    assert [row.name for row in checkout.db.models()] == ["m"]


def test_a_plain_endpoint_is_registered(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(checkout.home))
    monkeypatch.setenv("MILLRACE_CONFIG_DB", checkout.settings.require_config_db())
    result = CliRunner().invoke(app, ["models", "add", "api", "--endpoint", "http://127.0.0.1:8000/v1"])
    assert result.exit_code == 0, result.output
    assert checkout.db.model("api").endpoint == "http://127.0.0.1:8000/v1"
