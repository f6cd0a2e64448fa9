"""Everything Millrace asks of the config table; nothing else opens a connection to it.

Rows come back detached: plain values that outlive the connection. Every method is one transaction. A database that does not
answer is an UnavailableError that names its host, never its password.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, NullPool, create_engine, func, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, OperationalError, ProgrammingError
from sqlalchemy.orm import Session

from millrace import prompts
from millrace.config_db.tables import Model, PromptStatus, PromptTemplate, Route, Run, RunState
from millrace.enrichment import Enrichment
from millrace.errors import ConfigError, NotFoundError, RefusedError, UnavailableError
from millrace.prompts import PromptText
from millrace.records import utc_now

_MIGRATIONS = Path(__file__).parent / "migrations"
_UNDEFINED_TABLE = "42P01"


class ConfigDb:
    """The config table behind an SQLAlchemy URL (MILLRACE_CONFIG_DB). Raises ConfigError for a URL that is not PostgreSQL's."""

    def __init__(self, url: str) -> None:
        self.url = _psycopg_url(url)
        # No pool: Airflow forks its tasks, and a forked connection is shared by accident.
        self._engine = create_engine(self.url, poolclass=NullPool, connect_args={"connect_timeout": 10})

    @property
    def where(self) -> str:
        """Host and database for messages, without user and password."""
        host = self.url.host or self.url.query.get("host") or "localhost"
        return f"{host}{f':{self.url.port}' if self.url.port else ''}/{self.url.database or ''}"

    @contextmanager
    def _session(self, lock: str | None = None) -> Iterator[Session]:
        """One transaction; those that name the same `lock` run one after the other."""
        try:
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                if lock:
                    session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:lock, 0))"), {"lock": lock})
                yield session
        except OperationalError as error:
            raise UnavailableError(
                f"The config table at {self.where} (MILLRACE_CONFIG_DB) does not answer: {_first_line(error)}. "
                "Start the database (`make up` on one machine) or correct the variable."
            ) from None
        except ProgrammingError as error:
            if getattr(error.orig, "sqlstate", None) == _UNDEFINED_TABLE:
                raise ConfigError(
                    f"The database at {self.where} has no config table yet. Run `millrace migrate`."
                ) from None
            if getattr(error.orig, "sqlstate", None) is None:  # the driver refused the URL before it asked any server
                raise ConfigError(
                    f"MILLRACE_CONFIG_DB, the URL of {self.where}, has an option that PostgreSQL's driver does not know. Correct it."
                ) from None
            raise

    def check(self) -> None:
        """Raise UnavailableError unless the database answers, ConfigError unless the config table is there."""
        with self._session() as session:
            session.execute(select(func.count()).select_from(Model))

    def migrate(self) -> None:
        """Bring the tables to the newest version. Safe to run twice and from several processes at once."""
        # Here, since every task opens the table and none migrates it: a third of the 0.35 s of imports that opening costs.
        from alembic import command
        from alembic.config import Config

        with self._session(lock="migrate") as session:
            config = Config()
            config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
            config.attributes["connection"] = session.connection()
            command.upgrade(config, "head")

    # prompts

    def push_prompt(self, name: str, prompt: PromptText, *, author: str, note: str = "") -> int:
        """Store a prompt as a new draft and return its version. The text of the newest version again is that version."""
        with self._session(lock=f"prompt {name}") as session:
            newest = session.scalar(
                select(PromptTemplate)
                .where(PromptTemplate.name == name)
                .order_by(PromptTemplate.version.desc())
                .limit(1)
            )
            if newest and (newest.system, newest.body) == (prompt.system, prompt.body):
                return newest.version
            version = newest.version + 1 if newest else 1
            session.add(
                PromptTemplate(
                    name=name, version=version, system=prompt.system, body=prompt.body, author=author, note=note
                )
            )
            return version

    def activate_prompt(self, name: str, version: int, enrichments: Iterable[Enrichment]) -> None:
        """Make a version the one that runs; the version that was active is retired. Active already: nothing happens.

        Raises ConfigError naming every problem that one of `enrichments` which use this prompt would have with it.
        """
        with self._session(lock=f"prompt {name}") as session:
            row = _prompt(session, name, version)
            if row.status == PromptStatus.ACTIVE:
                return
            problems = [
                f"{enrichment.name}: {problem}"
                for enrichment in enrichments
                if enrichment.prompt == name
                for problem in prompts.lint(
                    PromptText(row.system, row.body), enrichment.source.keep, f"prompt {name} version {version}"
                )
            ]
            if problems:
                raise ConfigError("Not activated.\n" + "\n".join(problems))
            active = select(PromptTemplate).where(
                PromptTemplate.name == name, PromptTemplate.status == PromptStatus.ACTIVE
            )
            for old in session.scalars(active):
                old.status = PromptStatus.RETIRED
            session.flush()  # at most one row may be active at any moment
            row.status, row.activated_at = PromptStatus.ACTIVE, utc_now()

    def prompt(self, name: str, version: int | None = None) -> PromptTemplate:
        """A version of a prompt; without `version` the active one. Raises NotFoundError with the next step."""
        with self._session() as session:
            return _prompt(session, name, version)

    def prompts(self, name: str | None = None) -> list[PromptTemplate]:
        """Every version of every prompt, or of one, oldest first."""
        query = select(PromptTemplate).order_by(PromptTemplate.name, PromptTemplate.version)
        with self._session() as session:
            return list(session.scalars(query if name is None else query.where(PromptTemplate.name == name)))

    # models and routes

    def upsert_model(self, name: str, **columns: Any) -> Model:
        """Add a model or change the given columns of its row (see `tables.Model`); others keep their value."""
        with self._session(lock=f"model {name}") as session:
            row = session.get(Model, name)
            if row is None:
                row = Model(name=name, **columns)
                session.add(row)
            for column, value in columns.items():
                setattr(row, column, value)
            session.flush()
            session.refresh(row)
            return row

    def model(self, name: str) -> Model:
        """Raises NotFoundError naming the models there are."""
        with self._session() as session:
            row = session.get(Model, name)
            if row is None:
                known = ", ".join(session.scalars(select(Model.name).order_by(Model.name))) or "none"
                raise NotFoundError(
                    f"The config table has no model '{name}' (known: {known}). "
                    f"Add it with `millrace models add {name} --from PATH`, or correct `model:`."
                )
            return row

    def models(self) -> list[Model]:
        with self._session() as session:
            return list(session.scalars(select(Model).order_by(Model.name)))

    def set_route(self, enrichment: str, model: str, priority: int = 100) -> None:
        """Let `model` answer an enrichment whose file names no model. Raises NotFoundError for an unknown model."""
        self.model(model)
        with self._session() as session:
            session.merge(Route(enrichment=enrichment, priority=priority, model=model))

    def routes(self, enrichment: str | None = None) -> list[Route]:
        """Routes of one enrichment or of all, the deciding one first."""
        query = select(Route).order_by(Route.enrichment, Route.priority)
        with self._session() as session:
            return list(session.scalars(query if enrichment is None else query.where(Route.enrichment == enrichment)))

    # runs

    def register_run(
        self, enrichment: str, partition: str, dag_run_id: str, is_alive: Callable[[str], bool], *, above: int = 0
    ) -> int:
        """Claim a partition for a DAG run and return the claim's number, which only grows.

        The same DAG run again keeps its number, unless another has claimed the partition since. Raises RefusedError
        naming the holder when another DAG run holds it and `is_alive(its id)`; a holder that is not alive is superseded.
        A new number is higher than `above` too: the highest that the target table has seen, which outlives a lost database.
        """
        with self._session(lock=f"run {enrichment} {partition}") as session:
            newest = _newest(session, enrichment, partition)
            if newest and newest.dag_run_id == dag_run_id:
                newest.state, newest.ended_at = RunState.OPEN, None
                return newest.number
            if newest and newest.state == RunState.OPEN:
                if is_alive(newest.dag_run_id):
                    raise RefusedError(
                        f"{enrichment} {partition} is being worked on by DAG run '{newest.dag_run_id}' "
                        f"(number {newest.number}). Wait until it ends, or mark it failed, then clear `plan` here."
                    )
                newest.state, newest.ended_at = RunState.SUPERSEDED, utc_now()
                session.flush()  # at most one claim may be open at any moment
            number = max(newest.number if newest else 0, above) + 1
            session.add(Run(enrichment=enrichment, partition=partition, number=number, dag_run_id=dag_run_id))
            return number

    def check_run(self, enrichment: str, partition: str, dag_run_id: str) -> int:
        """The DAG run's number, if it still has the last word on the partition; a closed run that is worked on again is reopened.

        Raises RefusedError when a later DAG run has claimed the partition, or this one never did.
        """
        with self._session(lock=f"run {enrichment} {partition}") as session:
            newest = _newest(session, enrichment, partition)
            if newest is None or newest.dag_run_id != dag_run_id:
                by = (
                    f"DAG run '{newest.dag_run_id}' (number {newest.number}) has it"
                    if newest
                    else "no DAG run has claimed it"
                )
                raise RefusedError(
                    f"{enrichment} {partition} is no longer this DAG run's: {by}. Clear `plan` to decide afresh and claim it again."
                )
            newest.state, newest.ended_at = RunState.OPEN, None
            return newest.number

    def close_run(
        self,
        enrichment: str,
        partition: str,
        dag_run_id: str,
        *,
        state: RunState | str,
        plan_id: str | None = None,
        counts: dict[str, Any] | None = None,
        tokens: dict[str, Any] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Record what came of a DAG run's claim and let go of the partition. A superseded run stays superseded.

        `counts` are rows by status and the like, `tokens` by kind. A DAG run that never claimed the partition (its `plan`
        failed) has nothing to close.
        """
        with self._session(lock=f"run {enrichment} {partition}") as session:
            row = _newest(session, enrichment, partition, Run.dag_run_id == dag_run_id)
            if row is None:
                return
            if row.state != RunState.SUPERSEDED:
                row.state = RunState(state)
            row.plan_id, row.seconds, row.ended_at = plan_id, seconds, utc_now()
            row.counts, row.tokens = counts or {}, tokens or {}

    def note_plan(self, enrichment: str, partition: str, dag_run_id: str, plan_id: str) -> None:
        """Record which plan a DAG run works under, as soon as it has one."""
        with self._session() as session:
            row = _newest(session, enrichment, partition, Run.dag_run_id == dag_run_id)
            if row is not None:
                row.plan_id = plan_id

    def newest_run(self, enrichment: str, partition: str, plan_id: str) -> Run | None:
        """The newest DAG run that works or worked under a plan."""
        with self._session() as session:
            return _newest(session, enrichment, partition, Run.plan_id == plan_id)

    def started_at(self, enrichment: str, partition: str, dag_run_id: str) -> datetime | None:
        """When a DAG run first claimed a partition, cleared or not since; None when it never did."""
        with self._session() as session:
            row = _newest(session, enrichment, partition, Run.dag_run_id == dag_run_id)
            return None if row is None else row.started_at

    @contextmanager
    def between_runs(self, enrichment: str, partition: str) -> Iterator[bool]:
        """Whether nobody is at work on a partition; for the time of the `with` block, nobody can claim it."""
        with self._session(lock=f"run {enrichment} {partition}") as session:
            newest = _newest(session, enrichment, partition)
            yield newest is None or newest.state != RunState.OPEN

    def runs(self, enrichment: str | None = None, limit: int = 20) -> list[Run]:
        """The latest runs, newest first."""
        query = select(Run).order_by(Run.id.desc()).limit(limit)
        with self._session() as session:
            return list(session.scalars(query if enrichment is None else query.where(Run.enrichment == enrichment)))


def _psycopg_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number, a bracket that is never closed
        raise ConfigError(
            "MILLRACE_CONFIG_DB is not an SQLAlchemy URL; e.g. postgresql://user:password@host:5432/millrace."
        ) from None
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigError(
            f"MILLRACE_CONFIG_DB names '{parsed.get_backend_name()}'; Millrace's config table needs PostgreSQL."
        )
    return parsed.set(drivername="postgresql+psycopg")


def _first_line(error: OperationalError) -> str:
    return str(error.orig).strip().split("\n")[0].rstrip(".")


def _prompt(session: Session, name: str, version: int | None) -> PromptTemplate:
    versions = list(
        session.scalars(select(PromptTemplate).where(PromptTemplate.name == name).order_by(PromptTemplate.version))
    )
    if not versions:
        raise NotFoundError(
            f"The config table has no prompt '{name}'. Push it with `millrace prompts push {name} --activate`."
        )
    for row in versions:
        if row.status == PromptStatus.ACTIVE if version is None else row.version == version:
            return row
    known = ", ".join(f"{row.version} ({row.status})" for row in versions)
    if version is None:
        raise NotFoundError(
            f"No version of prompt '{name}' is active; there are {known}. "
            f"Activate one with `millrace prompts activate {name} {versions[-1].version}`."
        )
    raise NotFoundError(f"Prompt '{name}' has no version {version}; there are {known}.")


def _newest(session: Session, enrichment: str, partition: str, *conditions: ColumnElement[bool]) -> Run | None:
    """The claim with the highest number; of all claims on a partition it is the only one that can be open."""
    query = select(Run).where(Run.enrichment == enrichment, Run.partition == partition, *conditions)
    return session.scalar(query.order_by(Run.number.desc()).limit(1))
