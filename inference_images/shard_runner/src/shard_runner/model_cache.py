"""A node's own copy of a model: made once by the first pod that needs it, under a lock, and proved by its digest.

The cache is a model store like the one it is filled from, so a copy is whole or absent, whoever is killed meanwhile.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from pathlib import Path

from millrace import model_store
from millrace.errors import ConfigError
from millrace.plan import PinnedModel

log = logging.getLogger("shard_runner")


def cached_folder(model: PinnedModel, store: str, cache: Path) -> Path:
    """The model's folder in `cache`, copied from `store` (a path or an s3:// URL) when it is not there or was damaged.

    Raises NotFoundError when the store does not have it, ConfigError when the store's files are not those the plan names.
    """
    folder = cache / model.location
    cache.mkdir(parents=True, exist_ok=True)
    # The kernel lets go of the lock of a pod that is killed.
    with open(cache / f".lock-{model.digest[:16]}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            if model_store.folder_digest(folder) == model.digest:
                return folder
            log.info("the node's copy of model %s is damaged; copying it again", model.name)
            shutil.rmtree(folder)
        log.info("copying model %s to the node's cache", model.name)
        name, _, _ = model.location.partition("/")
        copied = model_store.add_model(f"{store.rstrip('/')}/{model.location}", name, cache)
        if copied.digest != model.digest:
            shutil.rmtree(copied.folder)
            raise ConfigError(
                f"The model folder '{model.location}' in '{store}' was changed: its files hash to {copied.digest[:12]}…. "
                "Remove the folder and add the model again with `millrace models add`."
            )
        return folder
