from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millrace import publishing, validation
from millrace.errors import ConfigError, IncompleteError, NotFoundError, RefusedError, UnavailableError
from millrace.lake import Lake
from millrace.records import Audit, Joined
from tests.unit.publishing.runs import DATE, joined_run, make_plan, publish_together, read_rows, ready, spec

OTHER = "2026-11-02"
Keys = Callable[..., list[tuple[str, str]]]


def test_the_first_publish_creates_the_table_with_exactly_the_rows_of_the_run(lake: Lake, keys: Keys) -> None:
    run = ready(lake, make_plan(lake), 4)
    assert publishing.publish(lake, run, 1) == {"version": 1, "rows": 4, "already_live": False}
    assert keys() == [(DATE, str(i)) for i in range(4)]
    table = publishing.open_table(lake, "enriched/reviews")
    assert table is not None
    assert table.schema().to_arrow().field("dt").type == pa.string()
    assert table.metadata().partition_columns == ["dt"]


def test_publishing_again_changes_nothing(lake: Lake, keys: Keys) -> None:
    run = ready(lake, make_plan(lake), 4)
    publishing.publish(lake, run, 1)
    assert publishing.publish(lake, run, 1) == {"version": 1, "rows": 4, "already_live": True}
    assert DeltaTable(lake.uri("enriched/reviews")).version() == 1
    files = DeltaTable(lake.uri("enriched/reviews")).file_uris()
    assert publishing.publish(lake, run, 2) == {"version": 1, "rows": 4, "already_live": True}
    assert DeltaTable(lake.uri("enriched/reviews")).file_uris() == files
    assert [found.version for found in publishing.versions(lake, "enriched/reviews", DATE)] == [1]
    assert len(keys()) == 4


def test_an_older_run_that_was_held_up_does_not_replace_a_plan_that_a_newer_one_confirmed(
    lake: Lake, keys: Keys
) -> None:
    """Run 1 publishes a plan, run 3 decides the same plan again and changes nothing, then run 2 comes late with another."""
    run = ready(lake, make_plan(lake), 4)
    late = ready(lake, make_plan(lake, prompt_version=2), 3)
    publishing.publish(lake, run, 1)
    publishing.publish(lake, run, 3)
    with pytest.raises(RefusedError, match="run number 3; this is run number 2"):
        publishing.publish(lake, late, 2)
    assert len(keys()) == 4


def test_a_date_whose_live_file_was_lost_is_mended_by_the_same_plan_joined_again(lake: Lake, keys: Keys) -> None:
    plan = make_plan(lake)
    publishing.publish(lake, ready(lake, plan, 4), 1)
    lake.delete([file.path for file in Joined.load(lake, plan.paths.joined).files])
    assert publishing.publish(lake, ready(lake, plan, 4), 2)["already_live"] is False
    assert keys() == [(DATE, str(i)) for i in range(4)]


def test_a_new_plan_replaces_its_own_date_only(lake: Lake, keys: Keys) -> None:
    publishing.publish(lake, ready(lake, make_plan(lake), 3), 1)
    publishing.publish(lake, ready(lake, make_plan(lake, date=OTHER), 2), 1)
    publishing.publish(lake, ready(lake, make_plan(lake, prompt_version=2), 2, mark="new"), 2)
    assert keys() == [(DATE, "new0"), (DATE, "new1"), (OTHER, "0"), (OTHER, "1")]


def test_a_run_that_began_earlier_cannot_replace_a_newer_one(lake: Lake, keys: Keys) -> None:
    late = ready(lake, make_plan(lake), 3)
    publishing.publish(lake, ready(lake, make_plan(lake, prompt_version=2), 2, mark="new"), 2)
    with pytest.raises(RefusedError, match="run number 2"):
        publishing.publish(lake, late, 1)
    assert keys() == [(DATE, "new0"), (DATE, "new1")]


def test_a_run_that_decided_afresh_publishes_under_the_same_number(lake: Lake, keys: Keys) -> None:
    publishing.publish(lake, ready(lake, make_plan(lake), 3), 1)
    publishing.publish(lake, ready(lake, make_plan(lake, prompt_version=2), 1, mark="new"), 1)
    assert keys() == [(DATE, "new0")]


def test_a_date_of_zero_rows_is_replaced_by_nothing_and_says_so(lake: Lake, keys: Keys) -> None:
    publishing.publish(lake, ready(lake, make_plan(lake), 3), 1)
    empty = make_plan(lake, prompt_version=2)
    assert publishing.publish(lake, ready(lake, empty, 0), 2) == {"version": 2, "rows": 0, "already_live": False}
    assert keys() == []
    live = publishing.live_plan(lake, "enriched/reviews", DATE)
    assert live == {"plan_id": empty.plan_id, "run": empty.paths.root, "sample": False, "version": 2, "rows": 0}
    assert publishing.publish(lake, empty.paths.root, 2)["already_live"] is True


def test_the_first_publish_may_have_zero_rows(lake: Lake, keys: Keys) -> None:
    publishing.publish(lake, ready(lake, make_plan(lake), 0), 1)
    assert keys() == []
    publishing.publish(lake, ready(lake, make_plan(lake, prompt_version=2), 2), 2)
    assert len(keys()) == 2


class TestRefusals:
    def test_without_an_audit(self, lake: Lake) -> None:
        plan = make_plan(lake)
        joined_run(lake, plan)
        with pytest.raises(IncompleteError, match="Clear `validate`"):
            publishing.publish(lake, plan.paths.root, 1)
        assert publishing.open_table(lake, "enriched/reviews") is None

    def test_before_join_back(self, lake: Lake) -> None:
        with pytest.raises(IncompleteError, match="Clear `join_back`"):
            publishing.publish(lake, make_plan(lake).paths.root, 1)

    def test_with_the_audit_of_another_output_of_the_same_plan(self, lake: Lake) -> None:
        plan = make_plan(lake)
        run = ready(lake, plan)
        joined_run(lake, plan)
        with pytest.raises(IncompleteError, match="has not judged this output"):
            publishing.publish(lake, run, 1)

    def test_when_validate_said_no_and_the_earlier_version_stays_live(self, lake: Lake, keys: Keys) -> None:
        publishing.publish(lake, ready(lake, make_plan(lake), 3), 1)
        bad = make_plan(lake, prompt_version=2)
        joined_run(lake, bad, [("unknown", "not_json")] * 3, mark="bad")
        with pytest.raises(RefusedError):
            validation.validate(lake, bad.paths.root)
        with pytest.raises(RefusedError, match="unknown rate"):
            publishing.publish(lake, bad.paths.root, 2)
        assert keys() == [(DATE, "0"), (DATE, "1"), (DATE, "2")]

    @pytest.mark.parametrize("damage", ["missing", "longer"])
    def test_when_a_file_is_not_what_its_record_says(self, lake: Lake, damage: str) -> None:
        plan = make_plan(lake)
        run = ready(lake, plan)
        path = Joined.load(lake, plan.paths.joined).files[1].path
        if damage == "missing":
            lake.delete([path])
        else:
            lake.write(path, lake.read(path) + b"x")
        with pytest.raises(IncompleteError, match=r"part-1\.parquet"):
            publishing.publish(lake, run, 1)
        assert publishing.open_table(lake, "enriched/reviews") is None

    def test_when_a_file_has_another_type_than_the_plan(self, lake: Lake, keys: Keys) -> None:
        """Delta would take the commit and the table would be unreadable."""
        publishing.publish(lake, ready(lake, make_plan(lake), 3), 1)
        plan = make_plan(lake, prompt_version=2)
        schema = publishing.target_schema(plan)
        odd = schema.set(schema.get_field_index("rating"), pa.field("rating", pa.float64()))
        with pytest.raises(IncompleteError, match="'rating' is DOUBLE"):
            publishing.publish(lake, ready(lake, plan, columns=odd), 2)
        assert len(keys()) == 3

    def test_when_the_log_of_the_table_cannot_be_read(self, lake: Lake) -> None:
        run = ready(lake, make_plan(lake))
        lake.write("enriched/reviews/_delta_log/00000000000000000000.json", b"{torn")
        with pytest.raises(UnavailableError, match="'enriched/reviews' cannot be read"):
            publishing.publish(lake, run, 1)

    def test_when_others_never_stop_committing(self, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
        run = ready(lake, make_plan(lake))
        monkeypatch.setattr(publishing, "_commit", lambda *args: None)
        monkeypatch.setattr(publishing, "_pause", lambda round_: None)
        with pytest.raises(UnavailableError, match="20 times"):
            publishing.publish(lake, run, 1)


class TestSamples:
    def test_a_sample_never_replaces_a_full_date(self, lake: Lake, keys: Keys) -> None:
        publishing.publish(lake, ready(lake, make_plan(lake), 3), 1)
        with pytest.raises(RefusedError, match="full version"):
            publishing.publish(lake, ready(lake, make_plan(lake, row_sample=2), 2), 2)
        assert len(keys()) == 3

    def test_nor_a_full_date_of_zero_rows(self, lake: Lake) -> None:
        publishing.publish(lake, ready(lake, make_plan(lake), 0), 1)
        with pytest.raises(RefusedError, match="full version"):
            publishing.publish(lake, ready(lake, make_plan(lake, row_sample=2), 2), 2)

    def test_a_sample_replaces_a_sample_and_a_full_run_replaces_it(self, lake: Lake, keys: Keys) -> None:
        publishing.publish(lake, ready(lake, make_plan(lake, row_sample=1), 1), 1)
        publishing.publish(lake, ready(lake, make_plan(lake, row_sample=2), 2), 2)
        live = publishing.live_plan(lake, "enriched/reviews", DATE)
        assert live is not None and live["sample"] is True
        publishing.publish(lake, ready(lake, make_plan(lake), 3), 3)
        assert len(keys()) == 3

    def test_where_the_log_forgot_the_commit_the_plan_says_what_was_a_sample(
        self, lake: Lake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publishing.publish(lake, ready(lake, make_plan(lake, row_sample=1), 1), 1)
        monkeypatch.setattr(publishing, "versions", lambda *args: [])
        live = publishing.live_plan(lake, "enriched/reviews", DATE)
        assert live is not None and live["sample"] is True and live["version"] is None


WIDER = {"answer": spec()["answer"] | {"score": {"number": {"min": 0, "max": 1}, "optional": True}}}


class TestSchemaEvolution:
    def test_a_new_field_is_added_with_the_commit_and_is_null_in_older_dates(self, lake: Lake) -> None:
        publishing.publish(lake, ready(lake, make_plan(lake), 1), 1)
        publishing.publish(lake, ready(lake, make_plan(lake, date=OTHER, **WIDER), 1), 1)
        assert [(row["dt"], row["score"]) for row in read_rows(lake)] == [(DATE, None), (OTHER, None)]
        table = DeltaTable(lake.uri("enriched/reviews"))
        assert pa.schema(table.schema().to_arrow()).field("score").type == pa.float64()

    def test_a_removed_field_stays_and_is_null(self, lake: Lake) -> None:
        publishing.publish(lake, ready(lake, make_plan(lake, **WIDER), 1), 1)
        publishing.publish(lake, ready(lake, make_plan(lake, date=OTHER), 1), 1)
        rows = read_rows(lake)
        assert [(row["dt"], row["sentiment"], row["score"]) for row in rows] == [
            (DATE, "positive", None),
            (OTHER, "positive", None),
        ]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"answer": {"sentiment": {"boolean": True}}},
                "'sentiment' is STRING in the table and would become BOOLEAN",
            ),
            (
                {"source": {"key": "review_id"}, "columns": {"review_id": "string", "rating": "int32"}},
                "its key is 'id'",
            ),
            ({"columns": {"id": "string", "rating": "double"}}, "'rating' is INT in the table and would become DOUBLE"),
            ({"name": "reviews_b"}, "belongs to the enrichment 'reviews'"),
        ],
    )
    def test_what_the_table_cannot_take_is_refused_at_plan_time(self, lake: Lake, changes: dict, message: str) -> None:
        publishing.publish(lake, ready(lake, make_plan(lake), 1), 1)
        with pytest.raises(ConfigError, match=message) as caught:
            publishing.check_target(lake, make_plan(lake, **changes))
        assert "set target.path to a new table" in str(caught.value)

    def test_a_table_that_is_partitioned_otherwise_is_refused(self, lake: Lake) -> None:
        plan = make_plan(lake)
        DeltaTable.create(lake.uri("enriched/reviews"), publishing.target_schema(plan), partition_by=["rating"])
        with pytest.raises(ConfigError, match=r"partitioned by \['rating'\]"):
            publishing.check_target(lake, plan)

    def test_new_and_removed_fields_and_a_table_that_is_not_there_are_fine(self, lake: Lake) -> None:
        publishing.check_target(lake, make_plan(lake))
        publishing.publish(lake, ready(lake, make_plan(lake), 1), 1)
        publishing.check_target(lake, make_plan(lake, **WIDER))
        publishing.check_target(lake, make_plan(lake, answer={"tone": {"labels": ["warm", "cold"]}}))

    def test_a_kept_column_of_a_type_that_tables_do_not_take_is_refused_at_plan_time(self, lake: Lake) -> None:
        plan = make_plan(lake, columns={"id": "string", "rating": "duration[s]"})
        with pytest.raises(ConfigError, match=r"source.keep: column type duration\[s\] is not supported"):
            publishing.check_target(lake, plan)

    def test_every_kind_of_column_survives_the_table(self, lake: Lake) -> None:
        columns = {
            "id": "string",
            "rating": "int32",
            "at": "timestamp[ns, tz=Europe/Berlin]",
            "naive": "timestamp[ms]",
            "price": "decimal128(10, 2)",
            "tags": "large_list<item: large_string>",
            "place": "struct<city: string, zip: int16>",
        }
        source = {"keep": [name for name in columns if name != "id"]}
        publishing.publish(lake, ready(lake, make_plan(lake, source=source, columns=columns), 1), 1)
        publishing.check_target(lake, make_plan(lake, source=source, columns=columns))
        assert read_rows(lake)[0]["tags"] is None


class TestRollback:
    def published(self, lake: Lake) -> None:
        """DATE at version 1 (plan 1) and 3 (plan 2), OTHER at version 2."""
        publishing.publish(lake, ready(lake, make_plan(lake), 2, mark="old"), 1)
        publishing.publish(lake, ready(lake, make_plan(lake, date=OTHER), 1), 1)
        publishing.publish(lake, ready(lake, make_plan(lake, prompt_version=2), 1, mark="new"), 2)

    def test_it_brings_one_date_back_and_leaves_the_others(self, lake: Lake, keys: Keys) -> None:
        self.published(lake)
        plan = make_plan(lake)
        result = publishing.rollback(lake, plan.enrichment, DATE, 1)
        assert result == {"version": 4, "rows": 2, "plan_id": plan.plan_id, "already_live": False}
        assert keys() == [(DATE, "old0"), (DATE, "old1"), (OTHER, "0")]
        assert keys(3) == [(DATE, "new0"), (OTHER, "0")]
        live = publishing.live_plan(lake, "enriched/reviews", DATE)
        assert live is not None and live["plan_id"] == plan.plan_id
        assert publishing.versions(lake, "enriched/reviews", DATE)[0].rollback_to == 1

    def test_a_second_time_it_changes_nothing(self, lake: Lake) -> None:
        self.published(lake)
        enrichment = make_plan(lake).enrichment
        publishing.rollback(lake, enrichment, DATE, 1)
        assert publishing.rollback(lake, enrichment, DATE, 1)["already_live"] is True
        assert DeltaTable(lake.uri("enriched/reviews")).version() == 4

    def test_a_later_version_of_the_table_may_be_named_too(self, lake: Lake, keys: Keys) -> None:
        """Version 2 was another date's commit; this date's files were then still those of version 1."""
        self.published(lake)
        publishing.rollback(lake, make_plan(lake).enrichment, DATE, 2)
        assert keys()[0] == (DATE, "old0")

    def test_it_refuses_when_a_file_is_gone(self, lake: Lake, keys: Keys) -> None:
        self.published(lake)
        plan = make_plan(lake)
        lake.delete([Joined.load(lake, plan.paths.joined).files[0].path])
        with pytest.raises(RefusedError, match="1 of 2 files"):
            publishing.rollback(lake, plan.enrichment, DATE, 1)
        assert (DATE, "new0") in keys()

    def test_it_refuses_what_was_replaced_too_long_ago(self, lake: Lake) -> None:
        self.published(lake)
        enrichment = make_plan(lake).enrichment
        with pytest.raises(RefusedError, match="14 days"):
            publishing.rollback(lake, enrichment, DATE, 1, now=datetime.now(UTC) + timedelta(days=15))
        publishing.rollback(lake, enrichment, DATE, 1, now=datetime.now(UTC) + timedelta(days=13))

    @pytest.mark.parametrize(("version", "message"), [(99, "no version 99"), (-1, "no version -1"), (0, "no dt=")])
    def test_it_names_the_versions_there_are(self, lake: Lake, version: int, message: str) -> None:
        self.published(lake)
        with pytest.raises(NotFoundError, match=message):
            publishing.rollback(lake, make_plan(lake).enrichment, DATE, version)

    def test_a_publish_after_a_rollback_works(self, lake: Lake, keys: Keys) -> None:
        self.published(lake)
        publishing.rollback(lake, make_plan(lake).enrichment, DATE, 1)
        publishing.publish(lake, make_plan(lake, prompt_version=2).paths.root, 3)
        assert keys()[0] == (DATE, "new0")


def test_history_says_what_each_commit_was(lake: Lake) -> None:
    plan = make_plan(lake, row_sample=3)
    publishing.publish(lake, ready(lake, plan, 3), 7)
    [version] = publishing.versions(lake, "enriched/reviews")
    assert (version.version, version.partition, version.plan_id, version.run) == (
        1,
        DATE,
        plan.plan_id,
        plan.paths.root,
    )
    assert (version.rows, version.sample, version.unknown_rate, version.rollback_to) == (3, True, 0.0, None)


# -- several processes -------------------------------------------------------------------------------------------------


def test_two_processes_that_publish_one_plan_of_a_new_date_leave_one_version(lake: Lake, keys: Keys) -> None:
    run = ready(lake, make_plan(lake), 4)
    said = publish_together(lake, [(run, 1), (run, 1)])
    assert sorted("'already_live': True" in line for line in said) == [False, True]
    assert keys() == [(DATE, str(i)) for i in range(4)]
    assert len(publishing.versions(lake, "enriched/reviews")) == 1


def test_two_processes_that_publish_two_plans_of_a_new_date_leave_the_higher_number(lake: Lake, keys: Keys) -> None:
    old = ready(lake, make_plan(lake), 4, mark="old")
    new = ready(lake, make_plan(lake, prompt_version=2), 3, mark="new")
    publish_together(lake, [(old, 1), (new, 2)])
    assert keys() == [(DATE, f"new{i}") for i in range(3)]


def test_seven_processes_publish_seven_dates_of_a_new_table(lake: Lake, keys: Keys) -> None:
    dates = [f"2026-11-{day:02d}" for day in range(1, 8)]
    runs = [(ready(lake, make_plan(lake, date=date), 3), 1) for date in dates]
    said = publish_together(lake, runs)
    assert all("'already_live': False" in line for line in said)
    assert keys() == [(date, str(i)) for date in dates for i in range(3)]


def test_a_commit_that_went_in_and_was_reported_as_lost_counts_as_done(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, keys: Keys
) -> None:
    """A store may write the commit and answer 503; the repeated request then meets our own file and looks like a conflict."""
    run = ready(lake, make_plan(lake), 2)
    commit = publishing._commit

    def commit_unheard(*args: object) -> None:
        commit(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(publishing, "_commit", commit_unheard)
    assert publishing.publish(lake, run, 1) == {"version": 1, "rows": 2, "already_live": True}
    assert len(keys()) == 2


def test_a_publish_killed_after_its_commit_is_seen_as_done(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ready(lake, make_plan(lake), 2)
    commit = publishing._commit

    def commit_and_die(*args: object) -> None:
        commit(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(publishing, "_commit", commit_and_die)
    with pytest.raises(KeyboardInterrupt):
        publishing.publish(lake, run, 1)
    monkeypatch.undo()
    assert publishing.publish(lake, run, 1) == {"version": 1, "rows": 2, "already_live": True}
    assert Audit.load(lake, make_plan(lake).paths.audit).passed
