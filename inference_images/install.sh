#!/bin/sh
# Make an image's environment from its lock files, as `make setup` does on a machine:
#     inference_images/install.sh VENV dependencies LOCK [TORCH_LOCK]    what the lock files say
#     inference_images/install.sh VENV packages                          millrace and shard_runner, from this checkout
# Two steps, so that a change of our code leaves the image's large layer alone. Runs in the checkout's root, with
# Docker or without. TORCH_INDEX names an index that has TORCH_LOCK's wheels; torch alone is asked for there.
# DRY_RUN=1 resolves against the index and installs nothing but the installer.
set -eu
venv=$1
case $2 in
  dependencies)
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --no-deps --require-hashes -r requirements/installer.lock.txt
    if [ -n "${4:-}" ] && [ -z "${DRY_RUN:-}" ]; then
      "$venv/bin/python" -m pip install --quiet --no-deps --require-hashes \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r "$4"
    fi
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes \
      ${DRY_RUN:+--dry-run} --compile-bytecode -r "$3"
    ;;
  packages)
    "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --no-index \
      -e . -e ./inference_images/shard_runner
    ;;
  *)
    echo "install.sh VENV dependencies LOCK [TORCH_LOCK] | packages" >&2
    exit 2
    ;;
esac
