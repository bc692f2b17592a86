#!/usr/bin/env bash
# A real SLURM cluster of several nodes on this one machine: slurmctld, a slurmd for each node, munge of its own.
#
#   eval "$(ci/slurm_cluster.sh up [FOLDER] [NODES])"    # prints  export SLURM_CONF=… PLUMBLINE_CLUSTER=…
#   ci/slurm_cluster.sh status [FOLDER]
#   ci/slurm_cluster.sh down [FOLDER]                    # ends its jobs and daemons and removes the folder
#
# All of a cluster's files are in its FOLDER (by default a new temporary folder; for `status` and `down`, the variable
# PLUMBLINE_CLUSTER may also name it). It uses free ports, so several clusters can run at the same time. As root, it
# installs Debian's packages slurm-wlm and munge if they are missing; only these remain after `down`.
# Exit codes: 0 done; 1 the cluster did not come up, or is not up (`status`); 3 SLURM is not available here; 4 usage.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"

GPUS_PER_NODE=8 # devices that jobs may request; they are not real
CPUS_PER_NODE=16
PACKAGES=(slurm-wlm munge)
PROGRAMS=(slurmctld slurmd srun sbatch scontrol munged)

say() { printf '%s: %s\n' "${0##*/}" "$1" >&2; }
die() { say "$2"; exit "$1"; }

main() {
  local command="${1:-}" folder="${2:-}"
  case "$command" in
    up) up "$folder" "${3:-2}" ;;
    status) status "$(known "$folder")" ;;
    down) down "$(known "$folder")" ;;
    *) die 4 "usage: ${0##*/} up [FOLDER] [NODES] | status [FOLDER] | down [FOLDER]" ;;
  esac
}

known() {
  local folder="${1:-${PLUMBLINE_CLUSTER:-}}"
  [ -n "$folder" ] || die 4 "which cluster? name its folder, or set PLUMBLINE_CLUSTER"
  printf '%s' "$folder"
}

up() {
  local folder="$1" nodes="$2"
  [[ "$nodes" =~ ^[1-9][0-9]?$ ]] || die 4 "a cluster has 1 to 99 nodes, not '$nodes'"
  install_packages
  if [ -z "$folder" ]; then
    folder="$(mktemp -d "${TMPDIR:-/tmp}/plumbline-slurm-XXXXXX")"
  else
    mkdir -p "$folder"
    folder="$(cd "$folder" && pwd)"
  fi
  if [ -e "$folder/slurm.conf" ]; then
    status "$folder" >/dev/null || die 1 "there is a cluster in $folder that is not well: take it down first"
  elif [ -n "$(ls -A "$folder")" ]; then
    die 4 "$folder is not empty, and holds no cluster: name another folder"
  else
    start "$folder" "$nodes"
  fi
  printf 'export SLURM_CONF=%q PLUMBLINE_CLUSTER=%q\n' "$folder/slurm.conf" "$folder"
}

install_packages() {
  local program missing=()
  for program in "${PROGRAMS[@]}"; do command -v "$program" >/dev/null || missing+=("$program"); done
  [ "${#missing[@]}" -gt 0 ] || return 0
  command -v apt-get >/dev/null || die 3 "SLURM is not here (${missing[*]}), and this is no Debian to install it on"
  [ "$(id -u)" = 0 ] || die 3 "SLURM is not here (${missing[*]}): as root, apt-get install ${PACKAGES[*]}"
  local install=(apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}")
  # Do not start the packages' own daemons: set a policy during the installation, unless there is one.
  local policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    # shellcheck disable=SC2064 # expanded now
    trap "rm -f '$policy'" EXIT
  fi
  export DEBIAN_FRONTEND=noninteractive
  "${install[@]}" >/dev/null 2>&1 || { apt-get update -qq && "${install[@]}"; } >/dev/null 2>&1 ||
    die 3 "apt-get install ${PACKAGES[*]} failed: is there a package source?"
}

start() {
  local folder="$1" nodes="$2" node
  chmod 755 "$folder" # the munge daemon requires a folder that others cannot write to
  mkdir -p "$folder"/{munge,state,spool,log,devices}
  configure "$folder" "$nodes"
  (umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
  export SLURM_CONF="$folder/slurm.conf"
  # --force: a folder below a world-writable temporary folder is fine here.
  munged --force --socket="$folder/munge/socket" --key-file="$folder/munge/key" --pid-file="$folder/munge/pid" \
    --log-file="$folder/log/munged.log" --seed-file="$folder/munge/seed" >"$folder/log/start.log" 2>&1 ||
    failed "$folder" munged
  slurmctld -c >>"$folder/log/start.log" 2>&1 || failed "$folder" slurmctld
  for node in $(seq 1 "$nodes"); do
    slurmd -N "node$node" >>"$folder/log/start.log" 2>&1 || failed "$folder" "node$node"
  done
  local tries=100 idle
  while ((tries-- > 0)); do
    idle="$(sinfo -h -N -p main -t idle -o %N 2>/dev/null | wc -l)"
    [ "$idle" = "$nodes" ] && return 0
    sleep 0.2
  done
  failed "$folder" "the nodes ($idle of $nodes are idle)"
}

failed() {
  say "$2 did not come up:"
  tail -n 5 "$1"/log/*.log >&2 || true
  down "$1"
  exit 1
}

configure() {
  local folder="$1" nodes="$2" user host ports node
  user="$(id -un)"
  host="$(hostname)"
  read -r -a ports <<<"$(free_ports $((nodes + 1)))"
  {
    cat <<CONF
ClusterName=plumbline
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[nodes]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/%n.log
# One machine simulates all nodes, whatever its own resources.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
# Use a node again when it is back, and schedule waiting jobs at once, because tests wait for them.
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=1
KillWait=5
# A job in the partition "urgent" preempts others.
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
CONF
    for node in $(seq 1 "$nodes"); do
      printf 'NodeName=node%d NodeHostname=%s NodeAddr=127.0.0.1 Port=%d CPUs=%d Gres=gpu:%d\n' \
        "$node" "$host" "${ports[node - 1]}" "$CPUS_PER_NODE" "$GPUS_PER_NODE"
    done
    printf 'PartitionName=main Nodes=node[1-%d] Default=YES MaxTime=60 State=UP PriorityTier=1\n' "$nodes"
    printf 'PartitionName=urgent Nodes=node[1-%d] MaxTime=60 State=UP PriorityTier=2 PreemptMode=OFF\n' "$nodes"
  } >"$folder/slurm.conf"
  # SLURM identifies devices by their files, which must be device files. Jobs get theirs in CUDA_VISIBLE_DEVICES.
  for node in $(seq 0 $((GPUS_PER_NODE - 1))); do ln -s /dev/null "$folder/devices/gpu$node"; done
  printf 'NodeName=node[1-%d] Name=gpu Flags=nvidia_gpu_env File=%s/devices/gpu[0-%d]\n' "$nodes" "$folder" $((GPUS_PER_NODE - 1)) \
    >"$folder/gres.conf"
}

free_ports() {
  python3 - "$1" <<'PYTHON'
import socket, sys
held = [socket.create_server(("", 0)) for _ in range(int(sys.argv[1]))]
print(*(one.getsockname()[1] for one in held))
PYTHON
}

status() {
  local folder="$1"
  [ -e "$folder/slurm.conf" ] || { say "there is no cluster in $folder"; return 1; }
  export SLURM_CONF="$folder/slurm.conf"
  timeout 10 scontrol ping >/dev/null 2>&1 || { say "the cluster in $folder does not answer"; return 1; }
  sinfo -N -p main -o "%N %T %E"
}

down() {
  local folder="$1" file pids=() pid tries=50
  [ -d "$folder" ] || return 0
  [ -e "$folder/slurm.conf" ] || die 4 "$folder holds no cluster: nothing was removed"
  folder="$(cd "$folder" && pwd)"
  export SLURM_CONF="$folder/slurm.conf"
  if timeout 5 scontrol ping >/dev/null 2>&1; then
    timeout 10 scancel --user="$(id -un)" --full || true
    while ((tries-- > 0)) && [ -n "$(timeout 5 squeue -h 2>/dev/null || true)" ]; do sleep 0.1; done
  fi
  # Nothing is kept, so the daemons need not shut down cleanly, which would take seconds each.
  for file in "$folder"/node*.pid "$folder"/slurmctld.pid "$folder"/munge/pid; do
    [ -e "$file" ] && pids+=("$(cat "$file")")
  done
  mapfile -t -O "${#pids[@]}" pids < <(of_jobs)
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do
    tries=100
    while ((tries-- > 0)) && kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
  done
  rm -rf -- "$folder"
}

# Leftovers of jobs: their processes, and the step daemons above them, have the cluster's configuration in common.
of_jobs() {
  local place pid
  for place in /proc/[0-9]*; do
    pid="${place#/proc/}"
    [ "$pid" != "$$" ] || continue
    { tr '\0' '\n' <"$place/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF"; } 2>/dev/null || continue
    if { tr '\0' '\n' <"$place/environ" | grep -q '^SLURM_JOB_ID='; } 2>/dev/null ||
      [[ "$(readlink "$place/exe" || true)" == */slurmstepd ]]; then
      printf '%s\n' "$pid"
    fi
  done
}

main "$@"
