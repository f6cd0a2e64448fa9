"""The order in which a shard's requests are asked."""

from __future__ import annotations

from millrace.lake import Lake
from millrace.plan import PinnedModel
from shard_runner.ask import prefix_fields
from shard_runner.requests import read_ids, stream
from tests.runner.build import build_run

TEXTS = [f"{'word ' * (1 + n * 7 % 23)}{n}" for n in range(500)]


def test_the_last_requests_are_asked_longest_first_and_the_others_as_they_lie(lake: Lake, model: PinnedModel) -> None:
    run = build_run(lake, TEXTS, model, row_group=64)
    asked = list(stream(lake, run.shard, read_ids(lake, run.shard), (), tail=100))
    assert [request.values["text"] for request in asked[:400]] == TEXTS[:400]
    assert sorted(request.values["text"] or "" for request in asked[400:]) == sorted(TEXTS[400:])
    lengths = [request.est_tokens for request in asked[400:]]
    assert lengths == sorted(lengths, reverse=True)


def test_only_wanted_requests_are_asked(lake: Lake, model: PinnedModel) -> None:
    run = build_run(lake, TEXTS, model)
    wanted = set(sorted(read_ids(lake, run.shard))[::3])
    assert {request.request_id for request in stream(lake, run.shard, wanted, (), tail=50)} == wanted


def test_requests_that_share_a_prefix_stay_together(lake: Lake, model: PinnedModel) -> None:
    body = "Product: {{ product }}\nSentence: {{ text }}\nRating: {{ rating }}"
    rows = [{"text": f"text {n}", "product": f"p{n % 3}", "rating": str(n)} for n in range(30)]
    run = build_run(lake, rows, model, body=body)
    assert prefix_fields(run.plan) == ("product",)
    asked = stream(lake, run.shard, read_ids(lake, run.shard), prefix_fields(run.plan), tail=100)
    products = [request.values["product"] for request in asked]
    assert products == sorted(products, key=str)


def test_a_text_inside_a_block_makes_every_other_placeholder_a_prefix(lake: Lake, model: PinnedModel) -> None:
    body = "{% if rating %}{{ text }}{% endif %}"
    run = build_run(lake, [{"text": "a", "rating": "1"}], model, body=body)
    assert prefix_fields(run.plan) == ("rating",)
