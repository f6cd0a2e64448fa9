#!/bin/sh
# Convert the demo model into the volume, whole or not at all.
set -eu
here=$(dirname "$0")
if [ ! -e "$MILLRACE_MODELS/.demo-model" ]; then
  rm -rf "$MILLRACE_MODELS/.demo-model.partial"
  python "$here/convert_demo_model.py" "$MILLRACE_MODELS/.demo-model.partial"
  mv "$MILLRACE_MODELS/.demo-model.partial" "$MILLRACE_MODELS/.demo-model"
fi
