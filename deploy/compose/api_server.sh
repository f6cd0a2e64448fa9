#!/bin/sh
# Airflow's simple auth manager reads its password from a file that it must be able to write, so that it cannot be a
# mounted secret: write it where only this container sees it, then become the server.
set -eu
umask 077
file=$AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE
printf '{"admin": "%s"}\n' "$AIRFLOW_ADMIN_PASSWORD" > "$file"
unset AIRFLOW_ADMIN_PASSWORD
exec airflow api-server
