"""The config table: prompts, models, routes and the ledger of runs, in PostgreSQL (docs/architecture.md, "The config table")."""

from millrace.config_db.repository import ConfigDb
from millrace.config_db.tables import Model, PromptStatus, PromptTemplate, Route, Run, RunState

__all__ = ["ConfigDb", "Model", "PromptStatus", "PromptTemplate", "Route", "Run", "RunState"]
