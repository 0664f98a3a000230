#!/bin/bash
# Pretraining on many nodes under Slurm, requeued until it finishes:
#
#     sbatch recipes/slurm.sh recipes/nala_340m.yaml output_dir=/shared/runs/nala train.parallel=hybrid
#
# Submit it, or a copy of it, from any folder. output_dir must be on storage that all nodes share. Three minutes
# before the time limit Slurm signals this script; the trainer finishes its step, saves a checkpoint and exits with
# 138, and the job is requeued and resumes. Otherwise the script exits with the code of its launcher. SIGTERM, to
# this script or to every process of the step, saves too; the job then ends: scancel --batch --signal=TERM JOB.
#SBATCH --job-name=nalanda
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Fill in what your cluster requires, and remove one #:
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
set -uo pipefail

# Nalanda's environment: fill in its folder, set NALANDA_ENV, or submit with it activated.
environment="${NALANDA_ENV:-${VIRTUAL_ENV:-$PWD/.venv}}"
if [[ -f "$environment/bin/activate" ]]; then
    source "$environment/bin/activate"
fi
# Slurm runs a copy of this script from its own folder, so the package tells where its recipes are.
NALANDA_PRETRAIN=$(python -c '
import importlib.util, pathlib
package = pathlib.Path(importlib.util.find_spec("nalanda").origin).parent
places = package / "recipes", package.parents[1] / "recipes"  # of an installed package, of a checkout
print(next(p / "pretrain.py" for p in places if (p / "pretrain.py").is_file()))
' 2>/dev/null) || {
    echo "slurm.sh: no Nalanda in $environment: set NALANDA_ENV to the folder of its environment" >&2
    exit 2
}
export NALANDA_PRETRAIN

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NALANDA_RENDEZVOUS="$host:$((20000 + SLURM_JOB_ID % 20000))"
export NALANDA_PROCESSES="${SLURM_GPUS_ON_NODE:-8}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then  # since 22.05 srun does not take over sbatch's --cpus-per-task
    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi

# Returns the exit code of process $1. A trapped signal ends `wait` early with another code, and the trap sets
# `woken`: wait again. bash keeps the code of a process that has already ended.
ended() {
    while woken=; wait "$1"; code=$?; [[ -n "$woken" ]]; do :; done
    return "$code"
}

# One task a node. torchrun ignores USR1, which would end it, and TERM, which would give its processes 30 seconds.
# Its processes have their own handlers.
srun --kill-on-bad-exit=1 bash -c "$(declare -f ended)"'
    (trap "" USR1 TERM; exec torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$NALANDA_PROCESSES" \
        --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$NALANDA_RENDEZVOUS" \
        --signals_to_handle SIGINT,SIGHUP,SIGQUIT "$NALANDA_PRETRAIN" "$@") &
    agent=$!
    trap "woken=yes; pkill -USR1 -P $agent" USR1
    trap "woken=yes; pkill -TERM -P $agent" TERM
    ended "$agent"
' bash "$@" &
step=$!

signalled=
trap 'signalled=yes woken=yes; kill -USR1 "$step"' USR1  # srun forwards it to its tasks
trap 'woken=yes; kill -USR1 "$step"' TERM  # of TERM srun makes a KILL
ended "$step"
code=$?

if [[ -n "$signalled" && "$code" -ne 0 ]]; then  # not 138: torchrun turns every code into 1
    echo "out of time: requeued, to resume from the checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
