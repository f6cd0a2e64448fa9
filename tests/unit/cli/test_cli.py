"""The commands as a person types them, on a small checkout of their own."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from millrace.cli import app
from tests.unit.conftest import Checkout

Run = Callable[..., str]


@pytest.fixture
def run(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line; returns what it printed, after checking its exit code."""
    monkeypatch.setenv("MILLRACE_HOME", str(checkout.home))
    monkeypatch.setenv("MILLRACE_LAKE", checkout.settings.lake)
    monkeypatch.setenv("MILLRACE_MODELS", checkout.settings.models)
    monkeypatch.setenv("MILLRACE_CONFIG_DB", checkout.settings.require_config_db())

    def invoke(*args: str, exit_code: int = 0) -> str:
        result = CliRunner().invoke(app, list(args), prog_name="millrace")
        assert result.exit_code == exit_code, result.output
        return result.output

    return invoke


def test_every_command_explains_itself(run: Run) -> None:
    for command in ("plan", "enrichments", "schema", "migrate", "prompts", "models", "routes"):
        assert command in run("--help")
        assert len(run(command, "--help").split("\n")) > 8


class TestPrompts:
    def test_pushed_listed_compared_and_activated(self, run: Run, checkout: Checkout) -> None:
        assert run("prompts", "diff", "mood") == "Version 1 and dags/prompts/mood are the same.\n"
        checkout.write_prompt("Read: {{ text }}")
        assert "+Read: {{ text }}" in run("prompts", "diff", "mood")
        assert run("prompts", "push", "--note", "reads better") == "mood: version 2\n"
        listed = json.loads(run("prompts", "list", "--json"))
        assert [(row["version"], row["status"], row["note"]) for row in listed] == [
            (1, "active", ""),
            (2, "draft", "reads better"),
        ]
        assert "Text: {{ text }}" in run("prompts", "show", "mood")
        assert run("prompts", "activate", "mood", "2") == "mood: version 2 is active\n"
        assert "Read: {{ text }}" in run("prompts", "show", "mood")
        assert "-Text: {{ text }}\n+Read: {{ text }}" in run("prompts", "diff", "mood", "1", "2")

    def test_that_has_no_placeholder_is_refused_by_lint_and_activate(self, run: Run, checkout: Checkout) -> None:
        assert "1 prompt(s) checked" in run("prompts", "lint")
        checkout.write_prompt("Label it.")
        for command in (("lint",), ("push", "mood", "--activate"), ("activate", "mood", "2")):
            assert "prompt mood" in run("prompts", *command, exit_code=2)
        assert "version 1, active" in run("prompts", "show", "mood")

    def test_refused_at_activation_says_what_stays_and_how_to_go_on(self, run: Run, checkout: Checkout) -> None:
        other = checkout.settings.prompts / "other"
        other.mkdir()
        (other / "system.jinja").write_text("Label.")
        (other / "body.jinja").write_text("{{ text }}")
        checkout.write_prompt("Label it: {{ stars }}")
        said = run("prompts", "push", "--activate", exit_code=2)
        assert "mood: version 2 is in the config table as draft. Not activated." in said
        assert "push it again" in said and "millrace prompts activate mood 2" in said
        listed = json.loads(run("prompts", "list", "--json"))
        assert [(row["prompt"], row["version"], row["status"]) for row in listed] == [
            ("mood", 1, "active"),
            ("mood", 2, "draft"),
            ("other", 1, "active"),
        ]

    def test_of_a_folder_that_is_not_there_are_named(self, run: Run, checkout: Checkout) -> None:
        assert "dags/prompts/x/ lacks" in run("prompts", "push", "x", exit_code=2)
        checkout.write_enrichment(prompt="x")
        assert "mood.yaml: prompt: there is no folder dags/prompts/x/" in run("prompts", "lint", exit_code=2)


class TestModels:
    def test_endpoint_is_a_model_without_files(self, run: Run) -> None:
        run(
            "models",
            "add",
            "hosted",
            "--endpoint",
            "http://host:8000/v1",
            "--setting",
            "max_concurrency=8",
            "--price",
            "0.5",
        )
        row = json.loads(run("models", "show", "hosted"))
        assert (row["engine"], row["served_name"], row["settings"]) == ("openai", "hosted", {"max_concurrency": 8})
        assert row["price_per_million_tokens"] == 0.5
        run("models", "add", "hosted", "--endpoint", "http://host:8000/v1", "--revision", "2")
        changed = json.loads(run("models", "show", "hosted"))
        assert changed["digest"] != row["digest"]
        assert changed["settings"] == {"max_concurrency": 8}

    def test_folder_is_added_without_a_database_and_listed_with_its_state(
        self, run: Run, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = checkout.home / "new-model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        with monkeypatch.context() as without:
            without.delenv("MILLRACE_CONFIG_DB")
            assert "is in the store" in run("models", "add", "n", "--from", str(folder))
            assert "config table" in run("models", "add", "n", "--from", str(folder), "--price", "1", exit_code=2)
        states = {row["model"]: row["state"] for row in json.loads(run("models", "list", "--json"))}
        assert states == {"m": "ready", "n": "in the store only"}
        assert "registered" in run("models", "add", "n", "--from", str(folder))
        states = {row["model"]: row["state"] for row in json.loads(run("models", "list", "--json"))}
        assert states == {"m": "ready", "n": "ready"}

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ((), "--from FOLDER"),
            (("--from", ".", "--endpoint", "http://x"), "not both"),
            (("--endpoint", "http://x", "--setting", "block_size"), "KEY=VALUE"),
            (("--from", "nowhere"), "There is no folder"),
        ],
    )
    def test_mistakes_say_what_to_give(self, run: Run, options: tuple[str, ...], words: str) -> None:
        assert words in run("models", "add", "x", *options, exit_code=2)

    def test_routes_are_set_and_listed(self, run: Run) -> None:
        assert "answered by m" in run("routes", "set", "mood", "m")
        assert json.loads(run("routes", "list", "--json")) == [{"enrichment": "mood", "priority": 100, "model": "m"}]
        assert "no model 'x'" in run("routes", "set", "mood", "x", exit_code=2)


class TestPlan:
    def test_prints_the_run_it_decided(self, run: Run) -> None:
        plan = json.loads(run("plan", "mood", "--partition", "2026-11-01", "--row-sample", "1", "--json"))
        assert plan["run"] == f"runs/mood/2026-11-01/{plan['plan_id']}"
        assert plan["decision"]["row_sample"] == 1
        assert plan["run"] in run("plan", "mood", "--partition", "2026-11-01", "--row-sample", "1")

    def test_mistakes_are_one_message_without_traceback(self, run: Run) -> None:
        output = run("plan", "mood", "--partition", "2026-12-24", exit_code=2)
        assert output.startswith("error: The source table 'source/reviews' of mood has no partition dt=2026-12-24")
        assert "Traceback" not in output

    @pytest.mark.parametrize("option", ["--row-sample", "--prompt-version"])
    @pytest.mark.parametrize("command", ["plan", "run"])
    def test_number_below_one_is_refused_by_its_option(self, run: Run, command: str, option: str) -> None:
        said = run(command, "mood", "--partition", "2026-11-01", option, "0", exit_code=2)
        assert f"Invalid value for '{option}'" in said

    def test_run_of_what_is_no_date_is_refused_before_anything_starts(self, run: Run, checkout: Checkout) -> None:
        assert "--partition is 'tomorrow'; it must be a date" in run(
            "run", "mood", "--partition", "tomorrow", exit_code=2
        )
        assert not (checkout.home / ".millrace" / "postgres").exists()

    def test_of_an_enrichment_that_is_not_there_names_those_that_are(self, run: Run) -> None:
        assert "the enrichments are: mood" in run("plan", "moood", "--partition", "2026-11-01", exit_code=2)

    def test_unreachable_database_is_something_to_try_again(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MILLRACE_CONFIG_DB", "postgresql://u:s3cret@127.0.0.1:1/x")
        output = run("plan", "mood", "--partition", "2026-11-01", exit_code=3)
        assert "127.0.0.1:1/x" in output
        assert "s3cret" not in output


class TestEnrichments:
    def test_broken_file_is_named_beside_the_sound_ones(self, run: Run, checkout: Checkout) -> None:
        (checkout.settings.enrichments / "broken.yaml").write_text("name: broken\nsourc: {}\n")
        output = run("enrichments", exit_code=2)
        assert "mood" in output
        assert "broken.yaml: sourc: is not a known key" in output

    def test_schema_shows_columns_and_what_the_engine_may_say(self, run: Run, checkout: Checkout) -> None:
        shown = json.loads(run("schema", "mood", "--json"))
        assert shown["columns"] == {"mood": "string"}
        assert shown["json_schema"]["properties"]["mood"]["enum"] == ["good", "bad"]
        checkout.write_enrichment(form="compact")
        assert json.loads(run("schema", "mood", "--json"))["choices"] == ["good", "bad"]
        assert "(form compact)" in run("schema", "mood")


def test_migrate_may_be_run_twice(run: Run) -> None:
    assert run("migrate") == run("migrate")
