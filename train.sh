#!/usr/bin/env bash
# Launches a task: bash train.sh tasks/TASK.py CONFIG.yaml [--section.field VALUE ...]
# One process on one device; where there are more devices (NPROC_PER_NODE) or nodes (NNODES, NODE_RANK, MASTER_ADDR,
# MASTER_PORT), one per device, started by sfumato/launcher.py.
set -euo pipefail

if [ $# -lt 1 ] || [ ! -f "$1" ]; then
  echo "usage: bash train.sh tasks/TASK.py CONFIG.yaml [--section.field VALUE ...]" >&2
  [ $# -lt 1 ] || echo "error: task not found: $1" >&2
  exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$root:$PWD${PYTHONPATH:+:$PYTHONPATH}"   # the folder of the call may hold rewards of your own
export MKL_CBWR="${MKL_CBWR-AUTO,STRICT}"   # a row of a matrix product does not depend on the number of rows
python=${PYTHON:-python}
if [ -z "${PYTHON:-}" ] && [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then
  python="$root/.venv/bin/python"
fi

# How many of so many devices a variable such as CUDA_VISIBLE_DEVICES leaves: CUDA takes the entries up to the first
# that is none. Unset leaves all, empty none.
count_visible() {
  local total=$1 name=$2 count=0 entry
  if [ -z "${!name+set}" ]; then
    echo "$total"
    return
  fi
  for entry in $(tr ',' ' ' <<<"${!name}"); do
    if [[ $entry =~ ^-?[0-9]+$ ]] && { [ "$entry" -lt 0 ] || [ "$entry" -ge "$total" ]; }; then
      break
    fi
    count=$((count + 1))
  done
  echo "$count"
}

count_devices() {
  local total=0 name=CUDA_VISIBLE_DEVICES
  if command -v nvidia-smi >/dev/null 2>&1; then
    total=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
  elif command -v rocm-smi >/dev/null 2>&1; then
    total=$(rocm-smi --showid --csv 2>/dev/null | grep -c '^card' || true)
    [ -z "${HIP_VISIBLE_DEVICES+set}" ] || name=HIP_VISIBLE_DEVICES
  fi
  [ "$total" -ge 1 ] || { echo 0; return; }
  count_visible "$total" "$name"
}

# With its roles on Ray a task is started once and starts the other processes itself.
is_on_ray() {
  local config=${2:-}
  case " $* " in *" --runtime.backend ray "*) return 0 ;; esac
  [ -f "$config" ] && grep -qE '^[^#]*\<backend: *"?ray\>' "$config"
}

nnodes=${NNODES:-1}
for name in NNODES NPROC_PER_NODE; do
  value=${!name:-1}
  if ! [[ $value =~ ^[1-9][0-9]*$ ]]; then
    echo "error: $name must be a whole number above 0, not '$value'" >&2
    exit 2
  fi
done
if [ -z "${NPROC_PER_NODE:-}" ] && is_on_ray "$@"; then
  NPROC_PER_NODE=1
fi
devices=${NPROC_PER_NODE:-$(count_devices)}
[ "${devices:-0}" -ge 1 ] || devices=1

# The configuration is read before anything heavy is imported or any process is started.
ranks=$((nnodes * devices))
[ "$ranks" -gt 1 ] || ranks=${WORLD_SIZE:-1}
WORLD_SIZE=$ranks "$python" -m sfumato.config "$@" || exit $?
case " $* " in *" --help "* | *" -h "*) exit 0 ;; esac

if [ "$nnodes" -eq 1 ] && [ "$devices" -eq 1 ]; then
  exec "$python" "$@"
elif [ "$nnodes" -eq 1 ]; then
  exec "$python" -m sfumato.launcher --nproc-per-node "$devices" "$@"
else
  exec "$python" -m sfumato.launcher --nproc-per-node "$devices" --nnodes "$nnodes" \
    --node-rank "${NODE_RANK:?set NODE_RANK to the number of this node, from 0 on}" \
    --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the first node}" --master-port "${MASTER_PORT:-29500}" "$@"
fi
