"""The folder of a plan's model, verified before anything loads it."""

from __future__ import annotations

import os
from pathlib import Path

from millrace import model_store
from millrace.plan import PinnedModel
from millrace.settings import Settings
from shard_runner.model_cache import cached_folder


def model_folder(model: PinnedModel) -> Path | None:
    """The model's folder in $MILLRACE_MODELS, its digest proved; None for models that an endpoint serves.

    Where MILLRACE_MODEL_CACHE names a folder of the node, the model is copied there once and loaded from there.

    Raises NotFoundError when it is not in the store, ConfigError when its files are not those the plan names.
    """
    if model.engine == "openai":
        return None
    store = Settings.from_env().models
    if cache := os.environ.get("MILLRACE_MODEL_CACHE"):
        return cached_folder(model, store, Path(cache))
    folder = Path(store) / model.location
    model_store.verify(folder, model.digest)
    return folder
