"""Alembic runs this file: it migrates over the connection, and inside the transaction, that it is handed."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table_schema=context.config.attributes["schema"])
context.run_migrations()
