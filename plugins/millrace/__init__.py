"""Millrace: daily enrichment of warehouse tables with a large language model.

The package that orchestrator, Spark drivers and inference pods share. Importing it needs neither Airflow, Spark nor vLLM;
modules that do need one of them live in `millrace.airflow` and `millrace.spark`.
"""

__version__ = "0.1.0"
