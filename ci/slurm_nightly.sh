#!/usr/bin/env bash
# A nightly run on one node of a SLURM cluster: sbatch ci/slurm_nightly.sh
# Adapt the partition; ask for as many gpus as the run is to use.
#SBATCH --job-name=plumbline
#SBATCH --nodes=1
#SBATCH --gpus=8
#SBATCH --time=01:00:00
#SBATCH --output=plumbline-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e .
# Plumbline starts its own ranks inside the job: they are torchrun's kind of rank, not SLURM tasks.
.venv/bin/pytest suites/ --gpus "${SLURM_GPUS_ON_NODE:-8}" --accelerator cuda
