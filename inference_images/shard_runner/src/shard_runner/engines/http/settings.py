"""The settings of one endpoint: the `settings` of a model in the config table whose engine is `openai`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from millrace.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, le=3600)]
Calls = Annotated[int, Field(ge=1, le=4096)]


class EndpointSettings(BaseModel):
    """Frozen, unknown keys refused, units in names. Those that change what is asked stand in `millrace.plan.ENDPOINT_ASKS`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: Literal["openai", "vllm"] = Field(
        "openai", description="`vllm`: its own fixed choices are used for form compact"
    )
    api_key_env: str | None = Field(
        None, description="variable that holds the key; MILLRACE_ENDPOINT_KEY, if set, otherwise"
    )

    structured: bool = Field(
        True, description="send the answer's schema; false for servers that refuse response_format"
    )
    system_role: bool = Field(
        True, description="false: the system text is put before the user's, for models without that role"
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    extra_body: dict[str, Any] = Field(
        {}, description="merged into each request; a null removes a field, e.g. {seed: null}"
    )

    connect_timeout_s: Seconds = 5
    read_timeout_s: Seconds = 120
    # vLLM's server and uvicorn close idle connections after 5 s. A client that waits longer writes into closed sockets.
    keepalive_expiry_s: Seconds = 3

    initial_concurrency: Calls = 8
    max_concurrency: Calls = 256
    latency_tolerance: float = Field(
        4, ge=1, description="concurrency grows while latency is within this many times the lowest"
    )

    max_tries: int = Field(5, ge=1, le=100)
    request_budget_s: Seconds = Field(600, description="of one request: all calls and waits between them")
    backoff_base_s: Seconds = 0.5  # the wait before try n is random between 0 and this times 2**(n-1)...
    backoff_max_s: Seconds = 30  # ...but never more than this

    breaker_window: int = Field(
        100, ge=10, description="requests over which the error share is judged, by their first try"
    )
    breaker_error_share: float = Field(0.05, ge=0, le=1)
    breaker_pause_s: Seconds = 5  # doubles with each probe that fails, up to a minute
    breaker_give_up_s: Seconds = 300
    breaker_max_openings: int = Field(5, ge=1, description="in a row, each followed by a probe that succeeded")

    start_deadline_s: Seconds = Field(300, description="from the first call until the endpoint has answered one")


def endpoint_settings(model: str, settings: Mapping[str, Any]) -> EndpointSettings:
    """Check a model's settings. Raises ConfigError naming the model, the key and what is wrong with it."""
    try:
        return EndpointSettings.model_validate(dict(settings))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"model '{model}', settings: {problems}. docs/endpoints.md lists them.") from error
