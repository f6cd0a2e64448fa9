"""Prompts, models, routes and runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NOW = sa.text("now()")

# Text that has once been active stays what it was, for whoever connects: old runs point at it.
_IMMUTABLE = """
CREATE FUNCTION prompt_template_is_immutable() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF OLD.status <> 'draft' AND (TG_OP = 'DELETE' OR NEW.status = 'draft'
      OR (NEW.name, NEW.version, NEW.system, NEW.body) IS DISTINCT FROM (OLD.name, OLD.version, OLD.system, OLD.body)) THEN
    RAISE EXCEPTION 'prompt % version % has been active and cannot be changed; push a new version', OLD.name, OLD.version;
  END IF;
  RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$;
CREATE TRIGGER prompt_template_immutable BEFORE UPDATE OR DELETE ON prompt_template
  FOR EACH ROW EXECUTE FUNCTION prompt_template_is_immutable();
"""


def upgrade() -> None:
    op.create_table(
        "prompt_template",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("system", sa.String, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("author", sa.String, nullable=False),
        sa.Column("note", sa.String, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
        sa.Column("activated_at", sa.DateTime(timezone=True)),
        sa.UniqueConstraint("name", "version", name="prompt_template_version"),
        sa.CheckConstraint("status IN ('draft', 'active', 'retired')", name="status_is_known"),
    )
    op.create_index(
        "prompt_template_one_active",
        "prompt_template",
        ["name"],
        unique=True,
        postgresql_where=sa.text("status = 'active'"),
    )
    op.execute(_IMMUTABLE)
    op.create_table(
        "model",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("location", sa.String, nullable=False),
        sa.Column("engine", sa.String, nullable=False),
        sa.Column("endpoint", sa.String),
        sa.Column("served_name", sa.String),
        sa.Column("settings", JSONB, nullable=False),
        sa.Column("resources", JSONB, nullable=False),
        sa.Column("dtype", sa.String, nullable=False),
        sa.Column("quantization", sa.String),
        sa.Column("context_tokens", sa.Integer, nullable=False),
        sa.Column("chars_per_token", sa.Float, nullable=False),
        sa.Column("price_per_million_tokens", sa.Float),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
        sa.CheckConstraint("engine IN ('vllm', 'openai')", name="engine_is_known"),
    )
    op.create_table(
        "route",
        sa.Column("enrichment", sa.String, primary_key=True),
        sa.Column("priority", sa.Integer, primary_key=True),
        sa.Column("condition", sa.String),
        sa.Column("model", sa.String, sa.ForeignKey("model.name"), nullable=False),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("enrichment", sa.String, nullable=False),
        sa.Column("partition", sa.String, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("dag_run_id", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("plan_id", sa.String),
        sa.Column("counts", JSONB, nullable=False),
        sa.Column("tokens", JSONB, nullable=False),
        sa.Column("seconds", sa.Float),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.UniqueConstraint("enrichment", "partition", "number", name="run_number"),
        sa.CheckConstraint("state IN ('open', 'success', 'failed', 'superseded')", name="state_is_known"),
    )
    op.create_index(
        "run_one_open", "run", ["enrichment", "partition"], unique=True, postgresql_where=sa.text("state = 'open'")
    )


def downgrade() -> None:
    for table in ("run", "route", "model", "prompt_template"):
        op.drop_table(table)
    op.execute("DROP FUNCTION prompt_template_is_immutable()")
