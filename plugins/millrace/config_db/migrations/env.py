"""Alembic's entry point. `ConfigDb.migrate` hands over its connection, so that migration and advisory lock share it."""

from alembic import context

from millrace.config_db.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
