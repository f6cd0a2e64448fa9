"""What has to be there before Airflow starts: two databases, a bucket, tables, a pool, prompts, a model, and a way to Spark.

    python deploy/compose/init.py

Runs at each `docker compose up` and changes nothing that is there: not a prompt that someone activated, nor the slots of the pool.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql
from pyarrow.fs import S3FileSystem

from millrace import model_store, sample_source
from millrace.canonical import content_hash
from millrace.config_db import ConfigDb
from millrace.errors import MillraceError, UnavailableError
from millrace.lake import Lake
from millrace.local import POOL
from millrace.prompt_push import prompt_names, push_prompts
from millrace.settings import Settings

# What the sample enrichments call their model, and where the service `demo-model` leaves it in the volume.
DEMO_MODEL = "smollm2-135m-instruct"
DEMO_FOLDER = ".demo-model"
ENDPOINT = "http://endpoint:8000/v1"
# SeaweedFS answers several seconds before it can store anything.
STORE_SECONDS = 120


def main() -> None:
    settings = Settings.from_env()
    profiles = os.environ.get("COMPOSE_PROFILES", "").split(",")
    create_database(settings.require_config_db())
    db = ConfigDb(settings.require_config_db())
    db.migrate()
    create_bucket(Lake(settings.lake))
    prepare_airflow(slots=int(os.environ.get("MILLRACE_POOL_SLOTS") or 1))
    load_sample(Lake(settings.lake), settings, db)
    add_demo_model(db, settings, profiles)
    # What Spark steps will submit: a connection that is wrong stops here and not in the first run.
    subprocess.run([Path(sys.executable).with_name("millrace"), "spark-command"], check=True)
    print("ready", flush=True)


def create_database(url: str) -> None:
    """The config table's database, beside Airflow's in the same server."""
    parts = urlsplit(url)
    name = parts.path.strip("/")
    with psycopg.connect(parts._replace(scheme="postgresql", path="/airflow").geturl(), autocommit=True) as connection:
        if not connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone():
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
            print(f"database '{name}' created", flush=True)


def create_bucket(lake: Lake) -> None:
    """The lake's bucket. Returns when something could be stored in it."""
    bucket = urlsplit(lake.root).netloc
    store = S3FileSystem(
        endpoint_override=os.environ.get("AWS_ENDPOINT_URL"),
        region=os.environ["AWS_REGION"],
        allow_bucket_creation=True,
    )
    deadline = time.monotonic() + STORE_SECONDS
    while True:
        try:
            store.create_dir(bucket)
            lake.write("init/stored", b"")
            return
        except (OSError, MillraceError) as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"Nothing can be stored in '{lake.root}' after {STORE_SECONDS} s: {error}"
                ) from error
            time.sleep(1)


def prepare_airflow(slots: int) -> None:
    """Airflow's tables, and the pool that bounds Spark tasks and shards, waiting pods included."""
    from airflow.models.pool import Pool
    from airflow.utils import db
    from airflow.utils.session import create_session

    db.initdb()
    with create_session() as session:
        if Pool.get_pool(POOL, session=session) is None:
            Pool.create_or_update_pool(
                POOL, slots=slots, description="Spark tasks and shards at once", include_deferred=True, session=session
            )


def load_sample(lake: Lake, settings: Settings, db: ConfigDb) -> None:
    """The sample tables, and the prompts that the config table has never seen."""
    sample_source.load(lake, settings.home / "data", rows=int(os.environ.get("MILLRACE_SAMPLE_ROWS") or 300))
    known = {prompt.name for prompt in db.prompts()}
    if missing := [name for name in prompt_names(settings) if name not in known]:
        push_prompts(db, settings, missing, author="compose", note="from the checkout", activate=True)


def add_demo_model(db: ConfigDb, settings: Settings, profiles: list[str]) -> None:
    """Register the demo model as the profile serves it: an endpoint, or a folder of the store for pods."""
    engine = "openai" if "endpoint" in profiles else "vllm"
    folder = Path(settings.models) / DEMO_FOLDER
    if any(row.name == DEMO_MODEL and row.engine == engine for row in db.models()) or not folder.is_dir():
        return
    if engine == "vllm":
        model = model_store.add_model(str(folder), DEMO_MODEL, settings.models)
        model_store.register(db, model, resources={"template": "vllm-cpu"})
    else:
        digest = content_hash([ENDPOINT, DEMO_MODEL, model_store.folder_digest(folder)])
        db.upsert_model(
            DEMO_MODEL, engine="openai", digest=digest, location="", endpoint=ENDPOINT, served_name=DEMO_MODEL,
            context_tokens=2048, settings={"server": "vllm"},
        )  # fmt: skip
    print(f"model '{DEMO_MODEL}' registered for engine {engine}", flush=True)


if __name__ == "__main__":
    main()
