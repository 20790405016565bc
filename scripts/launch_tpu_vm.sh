#!/usr/bin/env bash
# Every worker of a TPU VM slice: copy the project, set it up, run.
#   scripts/launch_tpu_vm.sh NAME --zone ZONE [--project PROJECT] [--no-copy] [--dry-run] [flags of `deepinit train`]
# Needs gcloud, logged in. Give --train.checkpoint-dir gs://...: the workers share no disk.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() { sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ -n ${1:-} && $1 != -* ]] || usage
name=$1
shift
where=() copy=1 dry=
while (($#)); do
  case $1 in
    --zone | --project) where+=("$1" "${2:?$1 needs a value}"); shift 2 ;;
    --no-copy) copy=; shift ;;
    --dry-run) dry=1; shift ;;
    --help | -h) usage ;;
    *) break ;;
  esac
done
[[ " ${where[*]} " == *" --zone "* ]] || usage
quoted=$(printf '%q ' "$@")
setup="mkdir -p deepinit && tar -xzf deepinit.tar.gz -C deepinit && make -C deepinit --silent setup && deepinit/.venv/bin/python -m pip install --quiet 'jax[tpu]'"
# nohup: the run outlives this connection; its lines are in deepinit/run.log of each worker
work="cd deepinit && nohup .venv/bin/deepinit train --cluster tpu-vm $quoted> run.log 2>&1 < /dev/null & sleep 5; tail -n 20 deepinit/run.log"
tpu=(gcloud compute tpus tpu-vm)
do_it() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}
if [[ -n $copy ]]; then
  archive=$(mktemp -d)
  trap 'rm -rf "$archive"' EXIT
  git -C "$root" archive --format=tar.gz --output "$archive/deepinit.tar.gz" HEAD
  do_it "${tpu[@]}" scp "$archive/deepinit.tar.gz" "$name:" --worker=all "${where[@]}"
  do_it "${tpu[@]}" ssh "$name" --worker=all "${where[@]}" --command "$setup"
fi
do_it "${tpu[@]}" ssh "$name" --worker=all "${where[@]}" --command "$work"
