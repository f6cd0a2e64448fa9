"""The suites that come with Millrace pass on the data that comes with Millrace, on a small day as on a whole one."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from millrace import sample_source
from millrace.enrichment import load_enrichments
from millrace.lake import Lake
from millrace.plan import Decision, PinnedModel, PinnedPrompt, Plan, PlanRecord
from millrace.prompts import read_prompt
from millrace.records import SuiteResult
from millrace.settings import Settings
from millrace.source_snapshot import snapshot
from millrace.spark.check_source import check_source

SETTINGS = Settings.from_env({})
ENRICHMENTS, _ = load_enrichments(SETTINGS.enrichments)


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Lake]:
    loaded = {rows: Lake(str(tmp_path_factory.mktemp("sample"))) for rows in (40, None)}
    for rows, lake in loaded.items():
        sample_source.load(lake, SETTINGS.home / "data", rows=rows, days=1)
    return loaded


@pytest.mark.parametrize("rows", [40, None])
@pytest.mark.parametrize("name", sorted(ENRICHMENTS))
def test_the_sample_passes_its_source_suite(
    spark: SparkSession, lakes: dict[int | None, Lake], name: str, rows: int | None
) -> None:
    lake, enrichment, date = lakes[rows], ENRICHMENTS[name], sample_source.partitions(1)[0]
    prompt = read_prompt(SETTINGS.prompts / enrichment.prompt)
    decision = Decision(
        enrichment=name,
        partition=date,
        spec=enrichment.spec(),
        prompt=PinnedPrompt(name=enrichment.prompt, version=1, system=prompt.system, body=prompt.body),
        golden="",
        models={"tiny": PinnedModel(name="tiny", digest="d1", engine="vllm", location="tiny/d1")},
        default_model="tiny",
        max_tokens=8,
        fingerprints={"tiny": "f"},
        accepted_fingerprints=["f"],
        source=snapshot(lake, enrichment, date),
        row_sample=None,
        ask_mode="reuse",
    )
    plan = Plan.make(decision, PlanRecord(dag_run_id="manual__1", user="test", params={}))
    plan.save(lake)

    check_source(spark, lake, plan.paths)

    said = SuiteResult.load(lake, plan.paths.source_check())
    assert [r.name for r in said.results if r.outcome != "met" and r.severity == "block"] == []
    assert said.passed
    assert said.rows == (rows or {"review_insights": 3708, "review_polarity_zh": 35124}[name])
