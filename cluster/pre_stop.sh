#!/usr/bin/env bash
# preStop hook of a pod, for Kubernetes sends SIGTERM to Ray at once and that would end what still has to save:
# bash cluster/pre_stop.sh [SECONDS]
# Asks the driver, where it runs in this pod, or else the roles' processes to stop, and waits until they have ended; a
# role tells the driver, which saves everywhere. terminationGracePeriodSeconds must be larger than SECONDS (300).
# It finds processes by name, which is right in a container of one's own and nowhere else.
set -euo pipefail

if [ -z "${KUBERNETES_SERVICE_HOST:-}" ]; then
  echo "error: this is for a pod; on other machines send SIGTERM to the driver" >&2
  exit 2
fi

# A task of any folder, as the launcher starts it: its script, and then its configuration.
drivers() { pgrep -f '^[^ ]*python[0-9.]* [^ -][^ ]*\.py [^ ]*\.ya?ml( |$)' || true; }

# Ray's own helpers go by the same prefix, and a raylet ends with them.
roles() { pgrep -af '^ray::' | grep -vE '^[0-9]+ ray::(IDLE|DashboardAgent|RuntimeEnvAgent|JobSupervisor)' | cut -d ' ' -f 1 || true; }

who=drivers
[ -n "$(drivers)" ] || who=roles
for pid in $($who); do
  kill -TERM "$pid" 2>/dev/null || true   # it may have ended by itself
done
until=$((SECONDS + ${1:-300}))
while [ -n "$($who)" ] && [ $SECONDS -lt $until ]; do
  sleep 1
done
