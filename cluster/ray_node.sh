#!/usr/bin/env bash
# What start_head.sh, start_worker.sh and stop.sh share. Source it, do not run it.
#
# Variables, all optional:
#   SFUMATO_CLUSTER_DIR  where pid files and logs of this machine's Ray nodes lie (default /tmp/sfumato-cluster-UID)
#   NODE_NAME            name of the pid file and the log: head, worker, or your own when one machine runs several
#   NODE_IP              address that other nodes reach this one by (default: what Ray finds)
#   RAY_AUTH_TOKEN_PATH  file with the cluster's token (default ~/.ray/auth_token); the same content on every node
#   PYTHON               Python of the environment that ray is installed in

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state_dir=${SFUMATO_CLUSTER_DIR:-/tmp/sfumato-cluster-$(id -u)}
stop_grace_s=${STOP_GRACE_S:-20}

fail() {
  echo "error: $1" >&2
  exit 2
}

find_python() {
  python=${PYTHON:-python}
  if [ -z "${PYTHON:-}" ] && [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then
    python="$root/.venv/bin/python"
  fi
  "$python" -c 'import ray' 2>/dev/null || fail "$python has no ray: pip install -e '.[ray]', or name another PYTHON"
  ray=("$python" -m ray.scripts.scripts)
}

# A folder in /tmp that somebody else made could hold pid files that stop.sh would obey.
make_state_dir() {
  (umask 077 && mkdir -p "$state_dir")
  [ -O "$state_dir" ] || fail "$state_dir belongs to another user: set SFUMATO_CLUSTER_DIR"
}

# Ray turns authentication on by itself for ray.init() on one machine only; here every process of a cluster needs both
# variables, the driver too.
use_token() {
  local may_generate=$1
  export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
  [ "$RAY_AUTH_MODE" = token ] || return 0
  [ -z "${RAY_AUTH_TOKEN:-}" ] || return 0
  export RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
  if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    [ "$may_generate" = yes ] || fail "no token in $RAY_AUTH_TOKEN_PATH: copy the head's file there (scp, mode 600)"
    mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
    (umask 077 && "$python" -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH")
    echo "made a new token: $RAY_AUTH_TOKEN_PATH"
  fi
  case $(stat -c %a "$RAY_AUTH_TOKEN_PATH") in
    *00) ;;
    *) echo "warning: others may read $RAY_AUTH_TOKEN_PATH: chmod 600 $RAY_AUTH_TOKEN_PATH" >&2 ;;
  esac
}

# Ray's 15 lets whatever else runs on a machine starve the processes that train.
export RAY_worker_niceness=${RAY_worker_niceness:-0}

# A connection to every worker and every object in transit is a file: the usual soft limit of 1024 is soon reached.
raise_open_files() {
  local hard
  hard=$(ulimit -Hn)
  [ "$(ulimit -Sn)" = unlimited ] || ulimit -Sn "$hard"
}

# Field 22 of stat: a pid alone may belong to another process by now. The name in field 2 may hold spaces. A process that
# has ended but that nobody has asked for (Z; containers without an init keep them) has none.
start_time() {
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  stat=${stat##*) }
  # shellcheck disable=SC2086
  set -- $stat
  [ "$1" != Z ] || return 1
  echo "${20}"
}

is_running() {
  local pid time
  [ -s "$1" ] || return 1
  read -r pid time <"$1"
  [ "$(start_time "$pid")" = "$time" ]
}

# launch NAME FOREGROUND ARGUMENTS...: starts Ray's processes of one node under one parent that ends them with itself.
launch() {
  local name=$1 foreground=$2
  shift 2
  local pid_file="$state_dir/$name.pid" log="$state_dir/$name.log"
  if is_running "$pid_file"; then
    fail "$name runs already on this machine ($pid_file): bash cluster/stop.sh $name, or set NODE_NAME"
  fi
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-5}   # Ray's 30 s are for serving
  export PYTHONPATH="$root:$PWD${PYTHONPATH:+:$PYTHONPATH}"   # what train.sh gives the driver
  if [ "$foreground" = yes ]; then
    echo "$$ $(start_time $$)" >"$pid_file"
    exec "${ray[@]}" start --block --disable-usage-stats "$@"
  fi
  setsid "${ray[@]}" start --block --disable-usage-stats "$@" >"$log" 2>&1 </dev/null &
  local pid=$!
  echo "$pid $(start_time "$pid")" >"$pid_file"
  local until=$((SECONDS + ${START_TIMEOUT_S:-120}))
  until grep -q 'block forever' "$log"; do
    if ! is_running "$pid_file"; then
      tail -n 20 "$log" >&2
      rm -f "$pid_file"
      fail "Ray did not start on this machine; the whole log: $log"
    fi
    if [ $SECONDS -ge $until ]; then
      tail -n 20 "$log" >&2
      stop_node "$pid_file"
      fail "Ray did not start within ${START_TIMEOUT_S:-120} s (START_TIMEOUT_S); the whole log: $log"
    fi
    sleep 0.2
  done
}

# All processes that descend from one; Ray's own stop command ends those of every cluster and user's run on a machine.
descendants() {
  local child
  for child in $(ps -o pid= --ppid "$1"); do
    echo "$child"
    descendants "$child"
  done
}

# stop_node PID_FILE: SIGTERM to the parent, which ends its node; SIGKILL to what is left after the grace period.
stop_node() {
  local pid time each
  if ! is_running "$1"; then
    rm -f "$1"
    return 0
  fi
  read -r pid time <"$1"
  local -a known=()
  for each in "$pid" $(descendants "$pid"); do
    if time=$(start_time "$each"); then   # it may have ended in between
      known+=("$each:$time")
    fi
  done
  kill -TERM "$pid"
  local until=$((SECONDS + stop_grace_s))
  while [ $SECONDS -lt $until ] && any_alive "${known[@]}"; do
    sleep 0.2
  done
  for each in "${known[@]}"; do
    if any_alive "$each"; then
      kill -KILL "${each%%:*}" 2>/dev/null || true   # it may end in between
    fi
  done
  rm -f "$1"
}

any_alive() {
  local each
  for each in "$@"; do
    [ "$(start_time "${each%%:*}")" != "${each##*:}" ] || return 0
  done
  return 1
}
