"""The config table's schema: prompts, models, routes and the ledger of runs.

The models below and `migrations/versions/` say the same; a test compares them on a real PostgreSQL.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import CheckConstraint, DateTime, ForeignKey, Index, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class PromptStatus(StrEnum):
    DRAFT = "draft"
    ACTIVE = "active"
    RETIRED = "retired"


class RunState(StrEnum):
    """How a run of one partition stands. `open` holds the date; a later run that takes it over marks it `superseded`."""

    OPEN = "open"
    SUCCESS = "success"
    FAILED = "failed"
    SUPERSEDED = "superseded"


def _one_of(column: str, values: type[StrEnum]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=f"{column}_is_known")


class Base(DeclarativeBase):
    type_annotation_map = {datetime: DateTime(timezone=True), dict[str, Any]: JSONB}  # noqa: RUF012


class PromptTemplate(Base):
    """One version of a prompt. Its text never changes: a trigger refuses that once the version has been active."""

    __tablename__ = "prompt_template"
    __table_args__ = (
        UniqueConstraint("name", "version", name="prompt_template_version"),
        Index("prompt_template_one_active", "name", unique=True, postgresql_where=text("status = 'active'")),
        _one_of("status", PromptStatus),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    version: Mapped[int]
    system: Mapped[str]
    body: Mapped[str]
    status: Mapped[str] = mapped_column(default=PromptStatus.DRAFT)
    author: Mapped[str]
    note: Mapped[str] = mapped_column(default="")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    activated_at: Mapped[datetime | None]


class Model(Base):
    """A model by its name. Its row may change; what a run uses is pinned in its plan."""

    __tablename__ = "model"
    __table_args__ = (CheckConstraint("engine IN ('vllm', 'openai')", name="engine_is_known"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[str]  # sha256 over the folder's files; for an endpoint over what it is called by
    location: Mapped[str]  # folder below the model store; empty for an endpoint
    engine: Mapped[str]
    endpoint: Mapped[str | None]  # base URL of an OpenAI-compatible API
    served_name: Mapped[str | None]
    settings: Mapped[dict[str, Any]] = mapped_column(default=dict)
    resources: Mapped[dict[str, Any]] = mapped_column(default=dict)  # of the pod: gpu, memory, cpu
    dtype: Mapped[str] = mapped_column(default="auto")
    quantization: Mapped[str | None]
    context_tokens: Mapped[int] = mapped_column(default=2048)  # the most the model can take
    chars_per_token: Mapped[float] = mapped_column(default=3.0)  # UTF-8 bytes of text per token, for estimates
    price_per_million_tokens: Mapped[float | None]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), onupdate=func.now())


class Route(Base):
    """Which model answers an enrichment that names none: the lowest priority wins."""

    __tablename__ = "route"

    enrichment: Mapped[str] = mapped_column(primary_key=True)
    priority: Mapped[int] = mapped_column(primary_key=True)
    condition: Mapped[str | None]  # no condition: every row
    model: Mapped[str] = mapped_column(ForeignKey("model.name"))


class Run(Base):
    """One run's claim on a partition and, once it is closed, what came of it."""

    __tablename__ = "run"
    __table_args__ = (
        UniqueConstraint("enrichment", "partition", "number", name="run_number"),
        Index("run_one_open", "enrichment", "partition", unique=True, postgresql_where=text("state = 'open'")),
        _one_of("state", RunState),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    enrichment: Mapped[str]
    partition: Mapped[str]
    number: Mapped[int]  # increases per enrichment and partition
    dag_run_id: Mapped[str]
    state: Mapped[str] = mapped_column(default=RunState.OPEN)
    plan_id: Mapped[str | None]
    counts: Mapped[dict[str, Any]] = mapped_column(default=dict)
    tokens: Mapped[dict[str, Any]] = mapped_column(default=dict)
    seconds: Mapped[float | None]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
