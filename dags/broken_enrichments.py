"""Enrichment files that are broken, as one import error in Airflow; no DAG ever comes from here.

Airflow keeps import errors by Python file and stops scheduling every DAG of a file that has one (seen in 3.3: they are marked stale).
So the factory, enrichment.py, leaves a broken file out, and this file says what is wrong with it.
"""

from __future__ import annotations

from pathlib import Path

from millrace.enrichment import load_enrichments
from millrace.errors import ConfigError

if _errors := load_enrichments(Path(__file__).with_name("enrichments"))[1]:
    raise ConfigError("\n".join(str(error) for error in _errors.values())) from None
