"""The engines, by the name that a plan's model carries. Imported only when one is opened: vLLM alone takes 6 s."""

from __future__ import annotations

from importlib import import_module

from millrace.errors import ConfigError
from shard_runner.engines.base import Engine, EngineSpec

ENGINES = {"vllm": "shard_runner.engines.vllm", "openai": "shard_runner.engines.openai"}


def open_engine(spec: EngineSpec) -> Engine:
    """Start the engine a model asks for. Raises ConfigError, UnavailableError."""
    module = ENGINES.get(spec.model.engine)
    if module is None:
        raise ConfigError(
            f"model '{spec.model.name}': engine '{spec.model.engine}' is not one of {', '.join(ENGINES)}."
        )
    try:
        engine: Engine = import_module(module).open_engine(spec)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine '{spec.model.engine}' needs the Python package '{error.name}', which this environment lacks. "
            "Run in the inference environment (`make setup`), or in an image of inference_images/."
        ) from error
    return engine
