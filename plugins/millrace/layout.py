"""Where everything of a run lies in the lake: the one place that builds these paths (docs/architecture.md, "A run on disk")."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from millrace.errors import ConfigError

_RUN = re.compile(r"^(?:(?P<lake>.*?)/)?runs/(?P<enrichment>[^/]+)/(?P<partition>[^/]+)/(?P<plan_id>[0-9a-f]{64})/?$")


def new_attempt() -> str:
    """A random id for one execution of a step; it writes only under its own prefix."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class RunPaths:
    """Paths of one plan's run, relative to the lake."""

    enrichment: str
    partition: str
    plan_id: str

    @classmethod
    def parse(cls, uri: str) -> tuple[str | None, RunPaths]:
        """Split a run's URI or relative path into (lake root or None, paths).

        Raises ConfigError when it is not `[lake/]runs/<enrichment>/<partition>/<plan id>`.
        """
        match = _RUN.match(uri)
        if not match:
            raise ConfigError(f"'{uri}' is not a run; expected <lake>/runs/<enrichment>/<partition>/<plan id>.")
        return match["lake"], cls(match["enrichment"], match["partition"], match["plan_id"])

    @property
    def root(self) -> str:
        return f"runs/{self.enrichment}/{self.partition}/{self.plan_id}"

    @property
    def plan(self) -> str:
        return f"{self.root}/plan.json"

    @property
    def manifest(self) -> str:
        return f"{self.root}/manifest.json"

    def extract(self, attempt: str) -> str:
        return f"{self.root}/extract/{attempt}"

    def source_check(self) -> str:
        return f"{self.root}/source_check.json"

    def shard(self, shard_id: str) -> str:
        return f"{self.root}/shards/{shard_id}"

    def shard_attempt(self, shard_id: str, attempt: str) -> str:
        return f"{self.root}/shards/{shard_id}/{attempt}"

    def complete(self, shard_id: str) -> str:
        return f"{self.root}/shards/{shard_id}/complete.json"

    @property
    def joined(self) -> str:
        return f"{self.root}/joined.json"

    @property
    def audit(self) -> str:
        return f"{self.root}/audit.json"

    @property
    def approval(self) -> str:
        return f"{self.root}/approval.json"

    @property
    def override(self) -> str:
        return f"{self.root}/override.json"

    @property
    def stop(self) -> str:
        return f"{self.root}/stop.json"

    def alerted(self, since: str) -> str:
        """Exists once a shard has alerted; `since` stands for the DAG run and its last start or clear."""
        return f"{self.root}/alerts/{since}"

    def report(self, dag_run_id: str) -> str:
        # Run ids carry colons and plus signs (`manual__2026-11-01T00:00:00+00:00`): safe in no shell, so they are mapped.
        return f"{self.root}/reports/{re.sub(r'[^A-Za-z0-9_.-]', '_', dag_run_id)}"


def answers_prefix(fingerprint: str) -> str:
    """Folder of every answer ever given under a fingerprint: the cross-run cache."""
    return f"answers/fingerprint={fingerprint}"


def answers_file(fingerprint: str, shard_id: str, attempt: str) -> str:
    return f"{answers_prefix(fingerprint)}/{shard_id}-{attempt}.parquet"


def golden_file(sha: str) -> str:
    """The golden rows of a prompt, stored by content so that pods need no checkout."""
    return f"golden/{sha}.jsonl"


def verdict_file(fingerprint: str, key: str) -> str:
    """A stored preflight verdict; key hashes image or endpoint, golden set and device."""
    return f"verdicts/{fingerprint}/{key}.json"


def published_prefix(target: str, partition: str, plan_id: str, attempt: str) -> str:
    """Folder of one attempt's files below an enriched table."""
    return f"{target}/dt={partition}/{plan_id}-{attempt}"
