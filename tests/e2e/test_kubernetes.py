"""The whole graph with its shards as pods, on the API server of tests/kubernetes: the same DAG, the real runner and model."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import yaml

from tests.e2e.conftest import ENRICHMENT, ROOT, ROWS, THIRD, Checkout
from tests.kubernetes.cluster import Cluster

IMAGE = "millrace/vllm-cpu:test"


def test_a_date_is_published_by_pods_though_one_is_evicted_at_work(
    checkout: Checkout, demo: str, tmp_path: Path
) -> None:
    folder = tmp_path / "vllm"
    folder.mkdir()
    container = {
        "name": "runner",
        "image": IMAGE,
        "env": [{"name": "MILLRACE_MODELS", "value": str(ROOT / ".millrace" / "models")}],
    }
    template = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "template"},
        "spec": {"containers": [container]},
    }
    (folder / "pod_template.yaml").write_text(yaml.safe_dump(template))
    with Cluster({IMAGE: [str(ROOT / ".venv-inference" / "bin" / "shard-runner")]}, ROOT) as cluster:

        def evict_the_first_at_work() -> None:
            while True:
                for pod in cluster.pods:
                    if "millrace/shard" in pod.labels and any("engine:" in line for _, line in pod.log):
                        cluster.evict(pod)
                        return
                time.sleep(0.05)

        threading.Thread(target=evict_the_first_at_work, daemon=True).start()
        in_cluster = {
            "MILLRACE_BACKEND": "kubernetes",
            "MILLRACE_POD_TEMPLATES": str(tmp_path),
            "KUBECONFIG": str(cluster.kubeconfig(tmp_path)),
        }
        said = Checkout(checkout.env | in_cluster).millrace("run", ENRICHMENT, "--partition", THIRD)
        components = [pod.labels["app.kubernetes.io/component"] for pod in cluster.created]
    assert "Evicted" in said
    assert components == ["preflight", "infer", "infer"]
    rows = checkout.published(THIRD)
    assert len(rows) == len({row["comment_id"] for row in rows}) == ROWS
    assert {row["answer_meta"]["plan_id"] for row in rows} == {checkout.run_of(THIRD).plan_id}
