#!/usr/bin/env bash
# Adds this machine to a cluster: bash cluster/start_worker.sh HEAD:PORT [--foreground] [OPTIONS of ray start]
# cluster/ray_node.sh names the variables.
set -euo pipefail
# shellcheck source=cluster/ray_node.sh
source "$(dirname "${BASH_SOURCE[0]}")/ray_node.sh"

address=${1:-}
[[ $address =~ ^.+:[0-9]+$ ]] || fail "usage: bash cluster/start_worker.sh HEAD:PORT [--foreground] [OPTIONS of ray start]"
shift
foreground=no
if [ "${1:-}" = --foreground ]; then
  foreground=yes
  shift
fi
name=${NODE_NAME:-worker}

find_python
make_state_dir
use_token no
raise_open_files
launch "$name" "$foreground" --address "$address" ${NODE_IP:+--node-ip-address "$NODE_IP"} "$@"

echo "this machine belongs to $address; to take it out: bash cluster/stop.sh $name"
