"""A run of one shard over the real review sentences, with the demo enrichment's prompt and the demo model."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from millrace.lake import Lake
from millrace.model_store import stored_models
from millrace.plan import PinnedModel
from millrace.settings import Settings
from shard_runner.engines.base import EngineSpec
from tests.runner.build import Run, build_run

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class SampleRun:
    run: Run
    spec: EngineSpec

    def forget_answers(self) -> None:
        """As if the shard had never been answered."""
        lake = self.run.lake
        lake.delete([f.path for prefix in (f"{self.run.paths.root}/shards", "answers") for f in lake.list(prefix)])


def sample_run(folder: Path, rows: int, form: str = "json") -> SampleRun:
    """`rows` distinct sentences of the sample as one shard in a lake below `folder`."""
    prompt = ROOT / "dags" / "prompts" / "review_insights"
    spec = yaml.safe_load((ROOT / "dags" / "enrichments" / "review_insights.yaml").read_text(encoding="utf-8"))
    system = (prompt / "system.jinja").read_text(encoding="utf-8")
    golden = [json.loads(line) for line in (prompt / "golden.jsonl").read_text(encoding="utf-8").splitlines()]
    table = pq.read_table(ROOT / "data" / "amazon_review_sentences.parquet", columns=["comment_text"])
    texts = list(dict.fromkeys(table["comment_text"].to_pylist()))
    while len(texts) < rows:  # more than the sample has: told apart by a number at the end
        texts += [f"{text} ({len(texts) + n})" for n, text in enumerate(texts[: rows - len(texts)])]
    store = Path(Settings.from_env().models)
    stored = next(model for model in stored_models(store) if "smol" in model.name.lower())
    model = PinnedModel(
        name=stored.name, digest=stored.digest, engine="vllm", location=stored.location, context_tokens=1024
    )
    run = build_run(
        Lake(str(folder / "lake")),
        texts[:rows],
        model,
        answer=spec["answer"],
        form=form,
        system=_few_shot(system, form),
        body=(prompt / "body.jinja").read_text(encoding="utf-8"),
        golden=golden,
        max_tokens=40,
    )
    enrichment = run.plan.enrichment
    return SampleRun(
        run,
        EngineSpec(
            model=model,
            schema=enrichment.schema,
            form=enrichment.form,
            sampling=enrichment.sampling,
            max_tokens=40,
            folder=stored.folder,
            want_confidence=enrichment.limits.confidence_floor is not None,
        ),
    )


def _few_shot(system: str, form: str) -> str:
    """The prompt's examples in the form that is asked for: `{"sentiment":"positive","topic":"price"}` as `positive|price`."""
    if form == "json":
        return system
    system = re.sub(r"\{.*\}", lambda found: "|".join(json.loads(found[0]).values()), system)
    return system.replace(" as JSON: ", " as ")
