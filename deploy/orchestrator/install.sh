#!/bin/sh
# Make the orchestrator's environment from its lock files, as `make setup` does:
#     deploy/orchestrator/install.sh VENV dependencies    what the lock files say
#     deploy/orchestrator/install.sh VENV packages        millrace and shard_runner, from this checkout
# Two steps, so that a change of our code leaves the image's large layer alone. Runs in the checkout's root, with
# Docker or without.
set -eu
venv=$1
case $2 in
  dependencies)
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --no-deps --require-hashes -r requirements/installer.lock.txt
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes --compile-bytecode \
      -r requirements/orchestrator.lock.txt
    ;;
  packages)
    "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --no-index \
      -e . -e ./inference_images/shard_runner
    ;;
  *)
    echo "install.sh VENV dependencies|packages" >&2
    exit 2
    ;;
esac
