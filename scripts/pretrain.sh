#!/usr/bin/env bash
# Pre-train with a config and any flags: scripts/pretrain.sh configs/gpt2_124m.yaml --scheme.name deepnorm --mesh.fsdp 8
# Sets the project up on the first call. The first argument is the config file; without one, the demo's.
set -euo pipefail
cd "$(dirname "$0")/.."
make --silent setup
config=configs/tiny.yaml
if [[ $# -gt 0 && $1 != -* ]]; then
  config=$1
  shift
fi
exec .venv/bin/deepinit train --config "$config" "$@"
