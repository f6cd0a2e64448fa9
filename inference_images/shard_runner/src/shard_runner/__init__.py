"""The shard runner: answers the requests of one shard with an engine, loses nothing, and keeps the engine full."""

__version__ = "0.1.0"
