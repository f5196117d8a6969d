#!/usr/bin/env bash
# Launches a task of a checkout: bash train.sh tasks/TASK.py CONFIG.yaml [--section.field VALUE ...]
# It is `sfumato launch` (sfumato/commands/launch.py) with this checkout and its .venv.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$root:$PWD${PYTHONPATH:+:$PYTHONPATH}"   # the folder of the call may hold rewards of your own
export MKL_CBWR="${MKL_CBWR-AUTO,STRICT}"   # a row of a matrix product does not depend on the number of rows
python=${PYTHON:-python}
if [ -z "${PYTHON:-}" ] && [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then
  python="$root/.venv/bin/python"
fi
if ! command -v "$python" >/dev/null 2>&1; then
  echo "error: there is no program $python: make setup, or set PYTHON to the Python that has sfumato's packages" >&2
  exit 2
fi
exec "$python" -m sfumato.cli launch "$@"
