"""The plan: the same decision is the same plan, and every mistake that can be seen beforehand is seen here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from millrace.canonical import sha256_hex
from millrace.errors import ConfigError, NotFoundError
from millrace.layout import golden_file
from millrace.plan import Plan
from millrace.records import FileRef, Manifest, ShardEntry
from tests.unit.conftest import ROWS, SPEC, Checkout


class TestDecision:
    def test_made_again_is_the_same_plan_whoever_makes_it(self, checkout: Checkout) -> None:
        first, again = checkout.plan(), checkout.plan(dag_run_id="scheduled__2")
        assert again.plan_id == first.plan_id
        assert Plan.read(checkout.lake, first.paths).record.dag_run_id == "manual__1", "the first record stays"

    def test_pins_what_it_read(self, checkout: Checkout) -> None:
        plan = checkout.plan()
        model = plan.decision.models["m"]
        assert (plan.decision.prompt.name, plan.decision.prompt.version) == ("mood", 1)
        assert plan.decision.prompt.body == "Text: {{ text }}"
        assert model.location == f"m/{model.digest}"
        assert plan.decision.max_tokens == plan.enrichment.schema.max_answer_tokens("json")
        assert plan.decision.source.columns == {"id": "string", "body": "string", "stars": "int32"}
        assert [file.path.rsplit("/", 2)[1:] for file in plan.decision.source.files] == [
            ["dt=2026-11-01", "part-0.parquet"]
        ]
        golden = checkout.lake.read(golden_file(plan.decision.golden))
        assert sha256_hex(golden) == plan.decision.golden
        assert plan.decision.accepted_fingerprints == [plan.decision.fingerprints["m"]]

    def test_prompt_activated_during_a_run_changes_the_next_plan_and_not_this_one(self, checkout: Checkout) -> None:
        before = checkout.plan()
        checkout.write_prompt("Read: {{ text }}")
        assert checkout.push() == 2
        after = checkout.plan()
        assert Plan.read(checkout.lake, before.paths).decision.prompt.version == 1
        assert after.decision.prompt.version == 2
        assert after.decision.fingerprints != before.decision.fingerprints
        assert checkout.plan(prompt_version=1).plan_id == before.plan_id

    def test_late_or_rewritten_file_is_another_plan_under_the_same_fingerprint(self, checkout: Checkout) -> None:
        plans = [checkout.plan()]
        checkout.write_source(name="part-1.parquet")
        plans.append(checkout.plan())
        checkout.write_source(ROWS.take([1, 0]), name="part-1.parquet")
        plans.append(checkout.plan())
        assert len({plan.plan_id for plan in plans}) == 3
        assert len({plan.decision.fingerprints["m"] for plan in plans}) == 1

    def test_other_dates_do_not_matter(self, checkout: Checkout) -> None:
        before = checkout.plan()
        checkout.write_source(partition="2026-11-02")
        assert checkout.plan().plan_id == before.plan_id

    def test_alias_changes_the_reading_and_not_the_fingerprint(self, checkout: Checkout) -> None:
        before = checkout.plan()
        checkout.write_enrichment(answer={"mood": {"labels": ["good", "bad"], "aliases": {"poor": "bad"}}})
        after = checkout.plan()
        assert after.decision.fingerprints == before.decision.fingerprints
        assert after.reading != before.reading

    def test_golden_rows_are_no_part_of_the_fingerprint(self, checkout: Checkout) -> None:
        before = checkout.plan()
        checkout.write_golden([{"text": "糟糕", "expected": {"mood": "bad"}}])
        after = checkout.plan()
        assert after.decision.golden != before.decision.golden
        assert after.decision.fingerprints == before.decision.fingerprints
        # 3 UTF-8 bytes a character: a token holds fewer of them.
        assert after.decision.models["m"].chars_per_token == 1.0
        assert before.decision.models["m"].chars_per_token == 3.0

    def test_context_follows_the_limits_up_to_what_the_model_can_take(self, checkout: Checkout) -> None:
        def context(chars: int) -> int:
            checkout.write_enrichment(limits={"max_text_chars": chars})
            return checkout.plan().decision.models["m"].context_tokens

        assert context(1000) == 1280
        assert context(100_000) == 8192

    def test_asked_afresh_is_a_plan_of_its_own_for_each_dag_run(self, checkout: Checkout) -> None:
        reuse, fresh, again, other = (
            checkout.plan(),
            checkout.plan(reuse_answers=False),
            checkout.plan(reuse_answers=False),
            checkout.plan(reuse_answers=False, dag_run_id="manual__2"),
        )
        assert fresh.decision.ask_mode == "fresh"
        assert fresh.plan_id == again.plan_id
        assert len({reuse.plan_id, fresh.plan_id, other.plan_id}) == 3

    def test_unknowns_are_asked_again_on_a_base_plan_whose_fingerprints_stay_accepted(self, checkout: Checkout) -> None:
        base = checkout.finish(checkout.plan())
        checkout.write_prompt("Read: {{ text }}")
        checkout.push()
        plan = checkout.plan(ask_unknowns_again=True, base_plan=base.paths.root)
        assert plan.decision.ask_mode == "unknowns"
        assert plan.decision.base_plan == base.paths.root
        assert set(plan.decision.accepted_fingerprints) == {
            base.decision.fingerprints["m"],
            plan.decision.fingerprints["m"],
        }

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"ask_unknowns_again": True}, "nothing published for 2026-11-01"),
            ({"ask_unknowns_again": True, "reuse_answers": False}, "choose one"),
            ({"base_plan": f"runs/mood/2026-11-01/{'0' * 64}"}, "set both or neither"),
            (
                {"ask_unknowns_again": True, "base_plan": f"runs/mood/2026-11-02/{'0' * 64}"},
                "not one of mood 2026-11-01",
            ),
            ({"ask_unknowns_again": True, "base_plan": f"runs/mood/2026-11-01/{'0' * 64}"}, "does not exist"),
        ],
    )
    def test_base_that_makes_no_sense_is_refused(
        self, checkout: Checkout, params: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            checkout.plan(**params)

    @pytest.mark.parametrize(
        "answer",
        [
            {"mood": {"labels": ["good", "bad"]}, "tone": {"labels": ["calm", "loud"]}},
            {"mood": {"labels": ["good", "bad", "mixed"]}},
        ],
    )
    def test_base_whose_answers_have_other_fields_or_labels_is_refused(
        self, checkout: Checkout, answer: dict[str, Any]
    ) -> None:
        base = checkout.plan()
        checkout.write_enrichment(answer=answer)
        checkout.write_golden([{"text": "lovely", "expected": {"mood": "good"}}])
        with pytest.raises(ConfigError, match="other fields, labels or another form"):
            checkout.plan(ask_unknowns_again=True, base_plan=base.paths.root)

    def test_base_that_differs_in_aliases_alone_is_kept(self, checkout: Checkout) -> None:
        base = checkout.finish(checkout.plan())
        checkout.write_enrichment(answer={"mood": {"labels": ["good", "bad"], "aliases": {"poor": "bad"}}})
        assert checkout.plan(ask_unknowns_again=True, base_plan=base.paths.root).decision.base_plan == base.paths.root

    def test_base_that_was_never_finished_is_refused_before_anything_starts(self, checkout: Checkout) -> None:
        base = checkout.plan()
        again = {"ask_unknowns_again": True, "base_plan": base.paths.root}
        with pytest.raises(ConfigError, match=r"never finished.*manifest\.json.*Finish that run first"):
            checkout.plan(**again)
        checkout.finish(base)
        manifest = Manifest.load(checkout.lake, base.paths.manifest)
        shard = ShardEntry(
            shard_id="a" * 16, model="m", fingerprint="f" * 64, requests=1, est_tokens=1, bytes=1, files=[]
        )
        checkout.lake.write(base.paths.manifest, manifest.model_copy(update={"shards": [shard]}).dump())
        with pytest.raises(ConfigError, match="1 of 1 shards"):
            checkout.plan(**again)
        answers = FileRef(path="answers/gone.parquet", size=10, rows=1)
        checkout.lake.write(
            base.paths.manifest, manifest.model_copy(update={"reused": 1, "reused_files": [answers]}).dump()
        )
        with pytest.raises(ConfigError, match=r"'answers/gone\.parquet' is missing"):
            checkout.plan(**again)

    def test_base_whose_prompt_used_a_column_that_is_no_longer_kept_is_refused(self, checkout: Checkout) -> None:
        checkout.write_prompt("{{ text }} {{ stars }}")
        checkout.push()
        base = checkout.plan()
        checkout.write_prompt("{{ text }}")
        checkout.push()
        checkout.write_enrichment(source=SPEC["source"] | {"keep": []})
        with pytest.raises(ConfigError, match=r"its prompt uses \['stars'\]"):
            checkout.plan(ask_unknowns_again=True, base_plan=base.paths.root)

    def test_route_decides_where_the_file_names_no_model(self, checkout: Checkout) -> None:
        checkout.write_enrichment(model=None)
        with pytest.raises(ConfigError, match="millrace routes set mood MODEL"):
            checkout.plan()
        checkout.db.set_route("mood", "m")
        assert checkout.plan().decision.default_model == "m"


class TestMistakes:
    def refused(self, checkout: Checkout, error: type[Exception], *words: str, **plan: Any) -> None:
        with pytest.raises(error) as caught:
            checkout.plan(**plan)
        for word in words:
            assert word in str(caught.value)
        assert not list(checkout.lake.list("runs")), "a refused plan leaves nothing behind"

    def test_missing_table(self, checkout: Checkout) -> None:
        checkout.write_enrichment(source=SPEC["source"] | {"path": "source/nowhere"})
        self.refused(checkout, NotFoundError, "source/nowhere", "source.path", "mood.yaml")

    def test_missing_partition_names_the_nearest(self, checkout: Checkout) -> None:
        for day in ("2026-10-01", "2026-10-02", "2026-11-09"):
            checkout.write_source(partition=day)
        self.refused(
            checkout,
            NotFoundError,
            "dt=2026-11-05",
            "2026-10-02, 2026-11-01, 2026-11-09",
            "on_missing",
            partition="2026-11-05",
        )

    def test_folder_that_is_not_partitioned(self, checkout: Checkout) -> None:
        checkout.write_enrichment(source=SPEC["source"] | {"partition_column": "day"})
        self.refused(checkout, ConfigError, "not partitioned by 'day'", "dt=2026-11-01")

    @pytest.mark.parametrize(("key", "column"), [("key", "uid"), ("text", "review"), ("keep", "price")])
    def test_missing_column_names_key_and_columns(self, checkout: Checkout, key: str, column: str) -> None:
        checkout.write_enrichment(source=SPEC["source"] | {key: [column] if key == "keep" else column})
        if key == "keep":
            checkout.write_prompt("Text: {{ text }}")
        self.refused(checkout, ConfigError, f"source.{key}", f"no column '{column}'", "id, body, stars")

    @pytest.mark.parametrize(
        ("column", "values", "words"),
        [
            ("body", pa.array([1, 2]), "source.text: column 'body' is int64"),
            ("id", pa.array([1.0, 2.0]), "source.key: column 'id' is double"),
            ("stars", pa.array([{"a": 1}] * 2, pa.map_(pa.string(), pa.int8())), "column 'stars'"),
        ],
    )
    def test_column_of_a_type_that_does_not_do(
        self, checkout: Checkout, column: str, values: pa.Array, words: str
    ) -> None:
        index = ROWS.schema.get_field_index(column)
        checkout.write_source(ROWS.set_column(index, column, values))
        self.refused(checkout, ConfigError, words)

    def test_files_that_disagree(self, checkout: Checkout) -> None:
        checkout.write_source(ROWS.drop_columns("stars"), name="part-1.parquet")
        folder = "source/reviews/dt=2026-11-01"
        words = f"'stars' is int32 in '{folder}/part-0.parquet', but missing in '{folder}/part-1.parquet'"
        self.refused(checkout, ConfigError, words)

    @pytest.mark.parametrize("data", [b"", b"PAR1 and no more"])
    def test_file_that_is_still_being_written_is_named(self, checkout: Checkout, data: bytes) -> None:
        checkout.write_source(name="part-1.parquet").write_bytes(data)
        self.refused(checkout, ConfigError, "dt=2026-11-01/part-1.parquet", "still being written", "clear `plan`")

    def test_nanoseconds_that_spark_cannot_read(self, checkout: Checkout) -> None:
        checkout.write_enrichment(source=SPEC["source"] | {"keep": ["stars", "at"]})
        at = pa.array([1, 2], pa.timestamp("ns"))
        path = checkout.write_source(ROWS.append_column("at", at))
        self.refused(checkout, ConfigError, "column 'at' is timestamp[ns], which Spark cannot read")
        pq.write_table(ROWS.append_column("at", at), path, use_deprecated_int96_timestamps=True)
        assert checkout.plan().decision.source.columns["at"] == "timestamp[us]", (
            "INT96, as older Sparks write it, is fine"
        )

    def test_no_active_prompt(self, checkout: Checkout) -> None:
        checkout.write_enrichment(prompt="another")
        self.refused(checkout, NotFoundError, "millrace prompts push another --activate")

    def test_prompt_whose_placeholder_is_no_longer_kept(self, checkout: Checkout) -> None:
        checkout.write_prompt("{{ text }} {{ stars }}")
        checkout.push()
        checkout.write_enrichment(source=SPEC["source"] | {"keep": []})
        self.refused(checkout, ConfigError, "['stars'] is neither `text` nor a column in source.keep")

    def test_unknown_model_and_folder_that_is_not_in_the_store(self, checkout: Checkout) -> None:
        shutil.rmtree(checkout.settings.models)
        self.refused(checkout, NotFoundError, "MILLRACE_MODELS", "millrace models add m --from PATH")
        checkout.write_enrichment(model="x")
        self.refused(checkout, NotFoundError, "no model 'x' (known: m)")

    def test_broken_or_missing_enrichment_file(self, checkout: Checkout) -> None:
        checkout.write_enrichment(limits={"unknown_rte": 0.1})
        self.refused(checkout, ConfigError, "mood.yaml: limits.unknown_rte", "not a known key")
        (checkout.settings.enrichments / "mood.yaml").unlink()
        self.refused(checkout, ConfigError, "mood.yaml", "no such enrichment")

    @pytest.mark.parametrize("partition", ["../../etc", "2026-13-01", "today", ""])
    def test_partition_that_is_no_date(self, checkout: Checkout, partition: str) -> None:
        self.refused(checkout, ConfigError, "YYYY-MM-DD", partition=partition)

    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            ([], "is empty"),
            (["text"], "line 1: expected"),
            ([{"stars": "5"}], "lacks ['text']"),
            ([{"text": 5}], "line 1: expected"),
            ([{"text": "a"}, {"text": "a", "expected": {"tone": "x"}}], "line 2: `expected` names ['tone']"),
        ],
    )
    def test_golden_rows_that_cannot_be_asked(self, checkout: Checkout, rows: list[Any], words: str) -> None:
        checkout.write_golden(rows)
        self.refused(checkout, ConfigError, "dags/prompts/mood/golden.jsonl", words)

    def test_target_that_cannot_take_the_answer(self, checkout: Checkout) -> None:
        write_deltalake(
            checkout.lake.uri("enriched/mood"), pa.table({"id": [1], "dt": ["2026-10-01"]}), partition_by=["dt"]
        )
        self.refused(checkout, ConfigError, "enriched/mood")


class TestSource:
    def test_zero_rows_are_a_partition_like_any_other(self, checkout: Checkout) -> None:
        checkout.write_source(ROWS.slice(0, 0), partition="2026-11-02")
        assert len(checkout.plan("2026-11-02").decision.source.files) == 1

    def test_missing_partition_is_empty_where_the_file_says_so(self, checkout: Checkout) -> None:
        checkout.write_enrichment(source=SPEC["source"] | {"on_missing": "empty"})
        source = checkout.plan("2026-11-02").decision.source
        assert source.files == []
        assert source.columns == {"id": "string", "body": "string", "stars": "int32"}

    def test_hidden_files_are_not_read(self, checkout: Checkout) -> None:
        for name in ("_temporary/0/part-9.parquet", ".part-9.parquet", "_SUCCESS", "part.crc"):
            checkout.write_source(name=name)
        assert len(checkout.plan().decision.source.files) == 1

    def test_columns_that_the_exclude_rule_uses_are_part_of_the_snapshot(self, checkout: Checkout) -> None:
        checkout.write_source(
            ROWS.append_column("lang", pa.array(["en", "de"])).append_column("other", pa.array([1, 2]))
        )
        checkout.write_enrichment(source=SPEC["source"] | {"exclude": "lang <> 'en'"})
        assert set(checkout.plan().decision.source.columns) == {"id", "body", "stars", "lang"}

    def test_dictionary_and_large_text_count_as_text(self, checkout: Checkout) -> None:
        table = ROWS.set_column(0, "id", ROWS["id"].dictionary_encode()).set_column(
            1, "body", ROWS["body"].cast(pa.large_string())
        )
        checkout.write_source(table)
        columns = checkout.plan().decision.source.columns
        assert (columns["id"], columns["body"]) == ("string", "string")

    def test_delta_table_gives_the_files_of_its_newest_version(self, checkout: Checkout) -> None:
        uri = checkout.lake.uri("source/delta")
        checkout.write_enrichment(source=SPEC["source"] | {"path": "source/delta"})
        for text in ("old", "new"):
            table = pa.table({"id": ["1"], "body": [text], "stars": [5], "dt": ["2026-11-01"]})
            write_deltalake(uri, table, partition_by=["dt"], mode="overwrite")
        before = checkout.plan()
        assert before.decision.source.format == "delta"
        (file,) = before.decision.source.files
        assert pq.read_table(file.path, partitioning=None)["body"].to_pylist() == ["new"]
        assert Path(file.path).stat().st_size == file.size
        write_deltalake(uri, table.set_column(3, "dt", pa.array(["2026-11-02"])), mode="append")
        assert DeltaTable(uri).version() == 2
        assert checkout.plan().plan_id == before.plan_id, "a commit to another date changes nothing"
        later = pa.table({"id": ["1"], "body": ["x"], "stars": [5], "lang": ["en"], "dt": ["2026-11-02"]})
        write_deltalake(uri, later, mode="append", schema_mode="merge")
        checkout.write_enrichment(source=SPEC["source"] | {"path": "source/delta", "keep": ["lang"]})
        assert checkout.plan().decision.source.columns["lang"] == "string", "a column added later"
        with pytest.raises(NotFoundError, match="2026-11-01, 2026-11-02"):
            checkout.plan("2026-11-03")
