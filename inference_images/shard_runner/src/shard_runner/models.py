"""The folder of a plan's model, verified before anything loads it."""

from __future__ import annotations

from pathlib import Path

from millrace import model_store
from millrace.plan import PinnedModel
from millrace.settings import Settings


def model_folder(model: PinnedModel) -> Path | None:
    """The model's folder in $MILLRACE_MODELS, its digest proved; None for models that an endpoint serves.

    Raises NotFoundError when it is not in the store, ConfigError when its files are not those the plan names.
    """
    if model.engine == "openai":
        return None
    folder = Path(Settings.from_env().models) / model.location
    model_store.verify(folder, model.digest)
    return folder
