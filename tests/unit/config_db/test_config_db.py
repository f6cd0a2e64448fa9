"""The config table on a real PostgreSQL."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text
from sqlalchemy.exc import InternalError, ProgrammingError

from millrace.config_db import ConfigDb, RunState
from millrace.config_db.tables import Base
from millrace.enrichment import Enrichment, parse_enrichment
from millrace.errors import ConfigError, NotFoundError, RefusedError, UnavailableError
from millrace.prompts import PromptText


@pytest.fixture
def url(postgres: Callable[[], str]) -> str:
    return postgres()


@pytest.fixture
def db(url: str) -> ConfigDb:
    db = ConfigDb(url)
    db.migrate()
    return db


def enrichment(prompt: str = "p", keep: tuple[str, ...] = ()) -> Enrichment:
    return parse_enrichment(
        {
            "name": "e",
            "source": {"path": "source/t", "key": "id", "text": "text", "keep": list(keep)},
            "prompt": prompt,
            "answer": {"mood": {"labels": ["good", "bad"]}},
            "target": {"path": "enriched/e"},
        }
    )


def alive(_: str) -> bool:
    return True


def dead(_: str) -> bool:
    return False


def migrate(url: str) -> None:
    ConfigDb(url).migrate()


class TestMigrations:
    def test_give_the_tables_that_the_models_declare(self, db: ConfigDb, url: str) -> None:
        with create_engine(db.url).connect() as connection:
            differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)
        assert differences == []

    def test_of_several_processes_at_once_all_succeed(self, url: str) -> None:
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            pool.map(migrate, [url] * 2)
        ConfigDb(url).check()

    def test_missing_are_named_with_the_command(self, url: str) -> None:
        with pytest.raises(ConfigError, match="millrace migrate"):
            ConfigDb(url).check()


class TestUnreachable:
    def test_database_is_named_by_host_and_never_with_its_password(self) -> None:
        with pytest.raises(UnavailableError) as caught:
            ConfigDb("postgresql://someone:s3cret@127.0.0.1:1/millrace").check()
        assert "127.0.0.1:1/millrace" in str(caught.value)
        assert "MILLRACE_CONFIG_DB" in str(caught.value)
        assert "s3cret" not in str(caught.value)
        assert "someone" not in str(caught.value)

    @pytest.mark.parametrize("url", ["sqlite:///x.db", "not a url", "mysql://h/d"])
    def test_url_that_is_not_postgresql_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"MILLRACE_CONFIG_DB"):
            ConfigDb(url)

    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://u:s3cret@h:port/x",
            "postgresql://u:s3cret@[::1/x",
            "postgresql://u:s3cret@127.0.0.1:1/x?nope=1",
        ],
    )
    def test_url_that_no_driver_understands_is_refused_without_its_password(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"MILLRACE_CONFIG_DB") as caught:
            ConfigDb(url).check()
        assert "s3cret" not in str(caught.value)


class TestPrompts:
    def test_same_text_again_is_the_same_version(self, db: ConfigDb) -> None:
        first, second = PromptText("s", "{{ text }}"), PromptText("s", "more {{ text }}")
        assert [db.push_prompt("p", prompt, author="a") for prompt in (first, first, second, second, first)] == [
            1,
            1,
            2,
            2,
            3,
        ]

    def test_pushed_at_once_get_one_version_each(self, db: ConfigDb) -> None:
        with ThreadPoolExecutor(4) as pool:
            versions = pool.map(
                lambda i: db.push_prompt("p", PromptText("s", f"{i} {{{{ text }}}}"), author="a"), range(8)
            )
        assert sorted(versions) == list(range(1, 9))

    def test_activating_retires_the_version_before(self, db: ConfigDb) -> None:
        for body in ("one {{ text }}", "two {{ text }}"):
            version = db.push_prompt("p", PromptText("s", body), author="a")
            db.activate_prompt("p", version, [enrichment()])
        assert [(row.version, row.status) for row in db.prompts("p")] == [(1, "retired"), (2, "active")]
        assert db.prompt("p").body == "two {{ text }}"
        db.activate_prompt("p", 1, [enrichment()])
        assert db.prompt("p").version == 1

    def test_lacking_a_placeholder_is_not_activated(self, db: ConfigDb) -> None:
        db.push_prompt("p", PromptText("s", "no placeholder"), author="a")
        with pytest.raises(ConfigError, match=r"e: prompt p version 1 body: has no \{\{ text \}\}"):
            db.activate_prompt("p", 1, [enrichment(), enrichment("another")])
        assert db.prompt("p", 1).status == "draft"

    def test_none_or_none_active_say_what_to_do(self, db: ConfigDb) -> None:
        with pytest.raises(NotFoundError, match="millrace prompts push p --activate"):
            db.prompt("p")
        db.push_prompt("p", PromptText("s", "{{ text }}"), author="a")
        with pytest.raises(NotFoundError, match="millrace prompts activate p 1"):
            db.prompt("p")
        with pytest.raises(NotFoundError, match=r"no version 7; there are 1 \(draft\)"):
            db.prompt("p", 7)

    @pytest.mark.parametrize(
        "change",
        [
            "UPDATE prompt_template SET body = 'x'",
            "UPDATE prompt_template SET status = 'draft'",
            "DELETE FROM prompt_template",
        ],
    )
    def test_once_active_cannot_be_changed_even_by_hand(self, db: ConfigDb, change: str) -> None:
        db.push_prompt("p", PromptText("s", "{{ text }}"), author="a")
        db.activate_prompt("p", 1, [])
        with pytest.raises((InternalError, ProgrammingError), match="cannot be changed"), db._session() as session:
            session.execute(text(change))
        assert db.prompt("p").body == "{{ text }}"


class TestModelsAndRoutes:
    def test_upsert_changes_only_what_is_given(self, db: ConfigDb) -> None:
        db.upsert_model("m", digest="d1", location="m/d1", engine="vllm", settings={"block_size": 32})
        row = db.upsert_model("m", digest="d2", location="m/d2")
        assert (row.digest, row.engine, row.settings, row.context_tokens) == ("d2", "vllm", {"block_size": 32}, 2048)

    def test_unknown_model_names_the_known_ones(self, db: ConfigDb) -> None:
        db.upsert_model("m", digest="d", location="m/d", engine="vllm")
        with pytest.raises(NotFoundError, match=r"no model 'x' \(known: m\)"):
            db.model("x")
        with pytest.raises(NotFoundError, match="no model 'x'"):
            db.set_route("e", "x")

    def test_lowest_priority_comes_first(self, db: ConfigDb) -> None:
        for name in ("a", "b"):
            db.upsert_model(name, digest="d", location="l", engine="vllm")
        db.set_route("e", "a", priority=200)
        db.set_route("e", "b", priority=50)
        db.set_route("e", "a", priority=50)
        assert [(route.priority, route.model) for route in db.routes("e")] == [(50, "a"), (200, "a")]


class TestRuns:
    def test_second_run_of_a_date_is_refused_while_the_first_lives(self, db: ConfigDb) -> None:
        assert db.register_run("e", "2026-11-01", "first", dead) == 1
        with pytest.raises(RefusedError, match="'first'"):
            db.register_run("e", "2026-11-01", "second", alive)
        assert db.register_run("e", "2026-11-02", "second", alive) == 1, "another date is free"

    def test_a_dead_holder_is_superseded_and_notices(self, db: ConfigDb) -> None:
        db.register_run("e", "d", "first", dead)
        assert db.register_run("e", "d", "second", dead) == 2
        with pytest.raises(RefusedError, match=r"'second' \(number 2\)"):
            db.check_run("e", "d", "first")
        assert db.check_run("e", "d", "second") == 2
        db.close_run("e", "d", "first", state="failed")
        assert [(run.dag_run_id, run.state) for run in db.runs("e")] == [("second", "open"), ("first", "superseded")]

    def test_same_dag_run_keeps_its_number_when_plan_is_cleared(self, db: ConfigDb) -> None:
        assert [db.register_run("e", "d", "first", alive) for _ in range(2)] == [1, 1]
        db.close_run("e", "d", "first", state=RunState.FAILED)
        started = db.started_at("e", "d", "first")
        assert db.register_run("e", "d", "first", alive) == 1
        assert db.runs("e")[0].state == "open"
        assert started is not None and db.started_at("e", "d", "first") == started
        assert db.started_at("e", "d", "second") is None

    def test_old_dag_run_whose_plan_is_cleared_after_a_later_one_gets_a_higher_number(self, db: ConfigDb) -> None:
        for dag_run in ("first", "second"):
            db.register_run("e", "d", dag_run, dead)
            db.close_run("e", "d", dag_run, state="success")
        assert db.register_run("e", "d", "first", dead) == 3

    def test_task_cleared_after_the_run_was_closed_holds_the_date_again(self, db: ConfigDb) -> None:
        db.register_run("e", "d", "first", dead)
        db.close_run("e", "d", "first", state="failed")
        assert db.check_run("e", "d", "first") == 1
        with pytest.raises(RefusedError):
            db.register_run("e", "d", "second", alive)

    def test_never_registered_is_refused(self, db: ConfigDb) -> None:
        with pytest.raises(RefusedError, match="Clear `plan`"):
            db.check_run("e", "d", "first")
        db.close_run("e", "d", "first", state="failed")
        assert db.runs() == []

    def test_closing_records_what_came_of_it(self, db: ConfigDb) -> None:
        db.register_run("e", "d", "first", dead)
        db.close_run(
            "e", "d", "first", state="success", plan_id="p", counts={"ok": 3}, tokens={"prompt": 9}, seconds=1.5
        )
        run = db.runs("e")[0]
        assert (run.state, run.plan_id, run.counts, run.tokens, run.seconds) == (
            "success",
            "p",
            {"ok": 3},
            {"prompt": 9},
            1.5,
        )
        assert run.ended_at is not None

    def test_number_is_higher_than_what_the_table_has_seen(self, db: ConfigDb) -> None:
        """A new, empty config table beside a lake that has been published to."""
        assert db.register_run("e", "d", "first", dead, above=7) == 8
        assert db.register_run("e", "d", "second", dead, above=7) == 9

    def test_registered_at_once_one_holds_the_date(self, db: ConfigDb) -> None:
        def register(dag_run: str) -> int | None:
            try:
                return db.register_run("e", "d", dag_run, alive)
            except RefusedError:
                return None

        with ThreadPoolExecutor(4) as pool:
            numbers = list(pool.map(register, [f"run{i}" for i in range(8)]))
        assert sorted(n for n in numbers if n is not None) == [1]
