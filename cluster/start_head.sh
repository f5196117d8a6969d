#!/usr/bin/env bash
# Starts the first node of a Ray cluster on this machine: bash cluster/start_head.sh [--foreground] [OPTIONS of ray start]
# RAY_PORT (6379) is the port that other nodes and drivers connect to. cluster/ray_node.sh names the other variables.
set -euo pipefail
# shellcheck source=cluster/ray_node.sh
source "$(dirname "${BASH_SOURCE[0]}")/ray_node.sh"

foreground=no
if [ "${1:-}" = --foreground ]; then
  foreground=yes
  shift
fi
name=${NODE_NAME:-head}
port=${RAY_PORT:-6379}

find_python
make_state_dir
use_token yes
raise_open_files
launch "$name" "$foreground" --head --port "$port" --include-dashboard=false \
  ${NODE_IP:+--node-ip-address "$NODE_IP"} "$@"

address=$(grep -oE "[-.:0-9A-Za-z_]+:$port\b" "$state_dir/$name.log" | head -n 1)
echo "the cluster's address: $address"
echo "other nodes:   bash cluster/start_worker.sh $address"
# A driver finds the token in its usual place.
variables=RAY_AUTH_MODE=$RAY_AUTH_MODE${RAY_AUTH_TOKEN_PATH:+ RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH}
[ "$variables" = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.ray/auth_token" ] \
  || echo "the driver:    export $variables"
echo "the driver:    bash train.sh tasks/rl_diffusion.py CONFIG.yaml --runtime.backend ray --runtime.address $address"
echo "to stop:       bash cluster/stop.sh"
