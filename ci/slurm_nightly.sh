#!/usr/bin/env bash
# A nightly run over the nodes of a SLURM cluster, from a machine that may submit, in cron or scrontab:
#   17 3 * * *  cd /shared/plumbline && ci/slurm_nightly.sh --nodes 2 --gpus 8 --partition gpu --time 01:00:00
# The checkout must be in a folder that every node sees. The arguments are those of `plumbline submit`. Prints the run's
# summary, and exits like the run: 0 all right, 1 a cell is bad, 2 the run is incomplete.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e .
status=0
.venv/bin/plumbline submit "$@" || status=$?
cat reports/latest/report.md
exit "$status"
