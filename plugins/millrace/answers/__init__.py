"""The one place where a model's text becomes values.

    schema = AnswerSchema.from_dict(spec["answer"])
    parsed = parse_answer(text, schema, finish_reason="stop")
    parsed.status, parsed.reason, parsed.values, parsed.repaired

It never guesses: one valid reading, or a non-answer with its reason. `docs/answers.md` has the rules with examples.
"""

from millrace.answers.confidence import held_to_floor, labels_of
from millrace.answers.parse import PARSER_VERSION, Parsed, parse_answer, split_reasoning
from millrace.answers.reasons import REASONS, Reason, Status, kind_of_skip, status_of
from millrace.answers.schema import AnswerSchema, AnswerSchemaError

__all__ = [
    "PARSER_VERSION",
    "REASONS",
    "AnswerSchema",
    "AnswerSchemaError",
    "Parsed",
    "Reason",
    "Status",
    "held_to_floor",
    "kind_of_skip",
    "labels_of",
    "parse_answer",
    "split_reasoning",
    "status_of",
]
