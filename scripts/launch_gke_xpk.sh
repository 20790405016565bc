#!/usr/bin/env bash
# A workload on a GKE cluster that XPK made: one pod a host of each slice, from an image that holds the project.
#   scripts/launch_gke_xpk.sh WORKLOAD --cluster CLUSTER --image IMAGE --tpu-type TYPE [--slices N] [--restarts N]
#     [--zone ZONE] [--project PROJECT] [--dry-run] [flags of `deepinit train`]
# A run that was preempted has saved and goes on in a restarted pod; give --train.checkpoint-dir gs://...
set -euo pipefail

usage() { sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ -n ${1:-} && $1 != -* ]] || usage
workload=$1
shift
cluster='' image='' type='' slices=1 restarts=10 where=() dry=
while (($#)); do
  case $1 in
    --cluster) cluster=${2:?--cluster needs a name}; shift 2 ;;
    --image) image=${2:?--image needs a name}; shift 2 ;;
    --tpu-type) type=${2:?--tpu-type needs a type}; shift 2 ;;
    --slices) slices=${2:?--slices needs a number}; shift 2 ;;
    --restarts) restarts=${2:?--restarts needs a number}; shift 2 ;;
    --zone | --project) where+=("$1" "${2:?$1 needs a value}"); shift 2 ;;
    --dry-run) dry=1; shift ;;
    --help | -h) usage ;;
    *) break ;;
  esac
done
[[ -n $cluster && -n $image && -n $type ]] || usage
quoted=$(printf '%q ' "$@")
command=(xpk workload create --cluster "$cluster" --workload "$workload" --docker-image "$image" --tpu-type "$type"
  --num-slices "$slices" --max-restarts "$restarts" "${where[@]}" --command "deepinit train --cluster gke ${quoted% }")
if [[ -n $dry ]]; then
  printf '%q ' "${command[@]}"
  printf '\n'
  exit 0
fi
exec "${command[@]}"
