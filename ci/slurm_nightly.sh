#!/usr/bin/env bash
# A nightly run over the nodes of a SLURM cluster, from a machine that may submit, in cron or scrontab:
#   17 3 * * *  cd /shared/plumbline && ci/slurm_nightly.sh --nodes 2 --gpus 8 --partition gpu --time 01:00:00
# The checkout must lie where every node sees it. The arguments are those of `plumbline submit`. It prints the run on
# one screen, and ends as the run does: 0 all right, 1 a cell is bad, 2 no whole run.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e .
status=0
.venv/bin/plumbline submit "$@" || status=$?
cat reports/latest/report.md
exit "$status"
