#!/usr/bin/env bash
# Ends the Ray nodes that start_head.sh and start_worker.sh started on this machine, and no others:
# bash cluster/stop.sh [NAME ...]
# A run that is on its way dies with them: send SIGTERM to the driver first and let it save.
set -euo pipefail
# shellcheck source=cluster/ray_node.sh
source "$(dirname "${BASH_SOURCE[0]}")/ray_node.sh"

[ -d "$state_dir" ] || exit 0
make_state_dir
if [ $# -eq 0 ]; then
  for file in "$state_dir"/*.pid; do   # the head last: a worker that loses it cannot sign off and takes its time
    name=$(basename "$file" .pid)
    [ ! -e "$file" ] || [ "$name" = head ] || set -- "$@" "$name"
  done
  [ ! -e "$state_dir/head.pid" ] || set -- "$@" head
fi
for name; do
  [ -e "$state_dir/$name.pid" ] || fail "no node $name was started here ($state_dir/$name.pid)"
  stop_node "$state_dir/$name.pid"
  echo "stopped $name"
done
