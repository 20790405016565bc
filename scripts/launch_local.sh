#!/usr/bin/env bash
# N processes on this machine, over loopback: what a cluster does, for trying it out.
#   scripts/launch_local.sh N [--devices D] [--retries R] [--verb VERB] [--dry-run] [flags of `deepinit train`]
# Each process gets D virtual CPU devices (8 / N unless given, or what XLA_FLAGS says). R times a run that can go on is
# started again: after a process was killed, was lost or stood still. Ctrl-C and SIGTERM reach every process.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deepinit=${DEEPINIT:-$root/.venv/bin/deepinit}

usage() { sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || usage
count=$1
shift
devices='' retries=0 verb=train dry=
while (($#)); do
  case $1 in
    --devices) devices=${2:?--devices needs a number}; shift 2 ;;
    --retries) retries=${2:?--retries needs a number}; shift 2 ;;
    --verb) verb=${2:?--verb needs a name}; shift 2 ;;
    --dry-run) dry=1; shift ;;
    --help | -h) usage ;;
    *) break ;;
  esac
done
if [[ ${XLA_FLAGS:-} != *xla_force_host_platform_device_count* || -n $devices ]]; then
  export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=${devices:-$((count < 8 ? 8 / count : 1))}"
fi

free_port() { "$root/.venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

pids=()
forward() { ((${#pids[@]} == 0)) || kill -s "$1" "${pids[@]}" 2>/dev/null || true; }
trap 'forward TERM; retries=0' TERM
trap 'forward INT; retries=0' INT

# One attempt; leaves the most telling status in $status: 1 and 2 are final, others may go on.
attempt() {
  local port i s failed_at=
  port=$(free_port)
  pids=()
  for ((i = 0; i < count; i++)); do
    "$deepinit" "$verb" --coordinator "127.0.0.1:$port" --processes "$count" --process "$i" "$@" &
    pids+=($!)
  done
  local running=("${pids[@]}")
  status=0
  while ((${#running[@]})); do
    local still=()
    for i in "${running[@]}"; do
      if kill -0 "$i" 2>/dev/null; then
        still+=("$i")
        continue
      fi
      s=0
      wait "$i" || s=$?
      if ((s && (status == 0 || s <= 2))); then status=$s; fi
      if ((s)) && [[ -z $failed_at ]]; then failed_at=$SECONDS; fi
    done
    running=("${still[@]}")
    # the others notice by themselves; those that do not are ended
    if [[ -n $failed_at ]] && ((${#running[@]} && SECONDS - failed_at > ${GRACE:-60})); then
      kill -KILL "${running[@]}" 2>/dev/null || true
    fi
    sleep 0.1 || true
  done
}

if [[ -n $dry ]]; then
  for ((i = 0; i < count; i++)); do
    printf 'XLA_FLAGS=%q ' "${XLA_FLAGS# }"
    printf '%q ' "$deepinit" "$verb" --coordinator 127.0.0.1:PORT --processes "$count" --process "$i" "$@"
    printf '\n'
  done
  exit 0
fi
for ((tries = 0; ; tries++)); do
  attempt "$@"
  if ((status == 0 || status == 1 || status == 2 || tries >= retries)); then exit "$status"; fi
  echo "launch_local: ended with status $status; start $((tries + 2)) of $((retries + 1))" >&2
done
