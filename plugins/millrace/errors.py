"""Whose fault is it, and does retrying help?

    MillraceError
    ├── ConfigError        a file, setting, table or plan is wrong: never retry, a person changes something   (exit 2)
    │   └── NotFoundError  something that was named does not exist
    ├── UnavailableError   an engine, endpoint, database or store does not answer now: retry later            (exit 3)
    ├── UnusableError      too many answers are unusable: the prompt or the model is at fault, never retry    (exit 4)
    ├── StoppedError       told to stop, everything finished is saved: retry at once                          (exit 75)
    └── RefusedError       a gate said no (checks, budget, ledger, unknown rate, another run): never retry    (exit 2)
        └── IncompleteError  something a step relies on is not proved complete: clear what is missing, go on

A bad row is never an exception: it becomes an answer with a status and a reason (`millrace.answers`).
Messages name the table, key, file or setting, and end with the next step to take. They never quote a row's text.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `shard-runner` and of the Spark applications; Airflow's outcome follows from them."""

    COMPLETE = 0
    CONFIG = 2
    UNAVAILABLE = 3
    UNUSABLE = 4
    STOPPED = 75


class MillraceError(Exception):
    """Base of everything Millrace raises on purpose; `exit_code` is what a process ends with."""

    exit_code: ExitCode = ExitCode.CONFIG


class ConfigError(MillraceError):
    """The plan, a file or a setting is wrong; retrying cannot help."""


class NotFoundError(ConfigError):
    """Something that was named (a table, a partition, a prompt, a model, a run) does not exist."""


class UnavailableError(MillraceError):
    """Something that usually answers does not answer now; retrying later helps."""

    exit_code = ExitCode.UNAVAILABLE


class UnusableError(MillraceError):
    """The model answers, but too often not usably; asking again gives the same."""

    exit_code = ExitCode.UNUSABLE


class StoppedError(MillraceError):
    """The process was told to stop and has saved what was finished; it can be resumed at once."""

    exit_code = ExitCode.STOPPED


class RefusedError(MillraceError):
    """A gate of the run said no; the message says which, by how much, and who can change that."""


class IncompleteError(RefusedError):
    """A step's input is not proved complete in the store; the message names what is missing."""
