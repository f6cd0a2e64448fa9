#!/bin/sh
# Convert the demo model into the volume, whole or not at all.
set -eu
if [ ! -e /models/.demo-model ]; then
  rm -rf /models/.demo-model.partial
  python /convert_demo_model.py /models/.demo-model.partial
  mv /models/.demo-model.partial /models/.demo-model
fi
