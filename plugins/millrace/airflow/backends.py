"""Where shards run: the deployment setting `MILLRACE_BACKEND`, read when a DAG is parsed, picks the operators.

Every backend gives `preflight` and `infer` the same task ids, the same mapping from exit code to outcome (`retries`) and the same
completion check, so that a runbook does not depend on it. Another backend is another `Backend` here.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow.sdk import BaseOperator

from millrace.airflow.operators import LocalShard, Preflight
from millrace.errors import ConfigError
from millrace.settings import BACKENDS


@dataclass(frozen=True)
class Backend:
    """The operators of `preflight`, and of `infer`, which is mapped over `shard_id`."""

    preflight: type[BaseOperator]
    shard: type[BaseOperator]


def backend(name: str) -> Backend:
    """The backend of that name. Raises ConfigError for one that this version does not have."""
    match name:
        case "local":
            return Backend(preflight=Preflight, shard=LocalShard)
        case "kubernetes":
            # Here, since a deployment without a cluster should not wait a second for its client.
            from millrace.airflow.kubernetes import PreflightPod, ShardPod

            return Backend(preflight=PreflightPod, shard=ShardPod)
        case _:
            raise ConfigError(f"MILLRACE_BACKEND is '{name}'; this version has {', '.join(BACKENDS)}.")
