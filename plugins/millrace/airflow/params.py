"""The fields of the trigger form: what a person may ask of one run."""

from __future__ import annotations

from airflow.sdk import Param


def form() -> dict[str, Param]:
    """Typed parameters of every enrichment's DAG. Each description is what the form shows under the field."""
    return {
        "partition": Param(
            None,
            type=["null", "string"],
            format="date",
            title="Partition",
            description="Business date to enrich, YYYY-MM-DD. Needed for a run started by hand; scheduled and backfill runs "
            "take it from their own interval.",
        ),
        "row_sample": Param(
            None,
            type=["null", "integer"],
            minimum=1,
            title="Row sample",
            description="Enrich only this many rows, the same ones each time. A sample never replaces a date that was "
            "published whole.",
        ),
        "prompt_version": Param(
            None,
            type=["null", "integer"],
            minimum=1,
            title="Prompt version",
            description="Version of the prompt to ask with. Empty: the active one.",
        ),
        "do_not_reuse_answers": Param(
            False,
            type="boolean",
            title="Do not reuse answers",
            description="Ask the model again for every row, even where the same question was answered before. Costs a whole run.",
        ),
        "ask_unknowns_again": Param(
            False,
            type="boolean",
            title="Ask unknowns again",
            description="Keep the answers that are ok in the published date and ask all others again, with the current prompt "
            "and model.",
        ),
    }
