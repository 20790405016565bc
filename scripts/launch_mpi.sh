#!/usr/bin/env bash
# N processes under Open MPI, which only starts them; they talk through jax.
#   scripts/launch_mpi.sh N [--hosts A,B] [--coordinator HOST:PORT] [--dry-run] [flags of `deepinit train`]
# On several hosts the coordinator is the first of them unless given; the project stands in the same folder on each.
# XLA_FLAGS and JAX_PLATFORMS are handed on.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deepinit=${DEEPINIT:-$root/.venv/bin/deepinit}

usage() { sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || usage
count=$1
shift
hosts='' coordinator='' dry=
while (($#)); do
  case $1 in
    --hosts) hosts=${2:?--hosts needs names}; shift 2 ;;
    --coordinator) coordinator=${2:?--coordinator needs HOST:PORT}; shift 2 ;;
    --dry-run) dry=1; shift ;;
    --help | -h) usage ;;
    *) break ;;
  esac
done
# threads of XLA share the cores as they like: Open MPI would pin each process to one
command=(mpirun -np "$count" --bind-to none --oversubscribe --tag-output)
if [[ -n $hosts ]]; then
  command+=(--host "$hosts")
  first=${hosts%%,*}
  coordinator=${coordinator:-${first%%:*}:8476}
fi
for name in XLA_FLAGS JAX_PLATFORMS; do
  if [[ -n ${!name:-} ]]; then command+=(-x "$name"); fi
done
if [[ ! -t 1 ]]; then command+=(-x TTY_COMPATIBLE=0); fi # mpirun gives its children a terminal of their own
command+=("$deepinit" train --cluster openmpi)
if [[ -n $coordinator ]]; then command+=(--coordinator "$coordinator"); fi
command+=("$@")
if [[ -n $dry ]]; then
  printf '%q ' "${command[@]}"
  printf '\n'
  exit 0
fi
exec "${command[@]}"
