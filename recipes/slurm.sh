#!/bin/bash
# Pretraining on many nodes under Slurm, requeued until it is done:
#
#     sbatch recipes/slurm.sh recipes/nala_340m.yaml output_dir=/shared/runs/nala train.parallel=hybrid
#
# output_dir must lie on storage that all nodes see. Three minutes before the time is up Slurm signals this
# script; the trainer finishes its step, saves and exits with 138, and the job goes back into the queue, to go
# on from there.
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
set -uo pipefail

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NALANDA_RENDEZVOUS="$host:$((20000 + SLURM_JOB_ID % 20000))"
export NALANDA_PROCESSES="${SLURM_GPUS_ON_NODE:-8}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

# One task a node. torchrun itself must not die of USR1: it ignores it, and its processes have handlers of their
# own. A trapped signal ends `wait` early, with a code above 128; hence the loop.
srun --kill-on-bad-exit=1 bash -c '
    (trap "" USR1; exec torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$NALANDA_PROCESSES" \
        --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$NALANDA_RENDEZVOUS" \
        recipes/pretrain.py "$@") &
    agent=$!
    trap "pkill -USR1 -P $agent" USR1
    code=129
    while kill -0 "$agent" 2>/dev/null; do wait "$agent"; code=$?; done
    exit "$code"
' bash "$@" &
step=$!

signalled=
trap 'signalled=yes; kill -USR1 "$step"' USR1  # srun hands it on to its tasks
code=129
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done

if [[ -n "$signalled" && "$code" -ne 0 ]]; then  # not 138: torchrun makes every code a 1
    echo "out of time: requeued, to go on from the checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
