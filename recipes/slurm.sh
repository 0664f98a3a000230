#!/bin/bash
# Pretraining on many nodes under Slurm, requeued until it finishes:
#
#     sbatch recipes/slurm.sh recipes/nala_340m.yaml output_dir=/shared/runs/nala train.parallel=hybrid
#
# Submit it, or a copy of it, from a folder that all nodes share; output_dir must be on such storage, too, or in a
# store (s3://…). Three minutes before the time limit Slurm signals this script: the trainer finishes its step and
# saves a checkpoint, and the job is requeued and resumes. After a crash the processes start again NALANDA_RESTARTS times (2) within the job,
# which is then requeued, NALANDA_REQUEUES times (10) in a row. The job ends with the trainer's exit code if that is
# success, bad input, training that diverged, or SIGTERM: scancel --batch --signal=TERM JOB saves and ends it.
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
recipes=$(python -c '
import importlib.util, pathlib
package = pathlib.Path(importlib.util.find_spec("nalanda").origin).parent
places = package / "recipes", package.parents[1] / "recipes"  # of an installed package, of a checkout
print(next(p for p in places if (p / "pretrain.py").is_file()))
' 2>/dev/null) || {
    echo "slurm.sh: no Nalanda in $environment: set NALANDA_ENV to the folder of its environment" >&2
    exit 2
}

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then  # since 22.05 srun does not take over sbatch's --cpus-per-task
    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi

# Beside the job's log: the exit codes of this start, and a line for each failed start in a row.
export NALANDA_EXIT_CODES="$PWD/nalanda-$SLURM_JOB_ID.codes"
failures="$PWD/nalanda-$SLURM_JOB_ID.failures"
rm -f "$NALANDA_EXIT_CODES"

# One task a node.
srun --kill-on-bad-exit=1 python "$recipes/launch.py" \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$host:$((20000 + SLURM_JOB_ID % 20000))" \
    --max_restarts "${NALANDA_RESTARTS:-2}" "$recipes/pretrain.py" "$@" &
step=$!

# srun forwards USR1 to its tasks; of TERM it makes a KILL. A trapped signal ends `wait` early: wait again.
terminated=
trap 'woken=yes; kill -USR1 "$step"' USR1
trap 'woken=yes terminated=yes; kill -USR1 "$step"' TERM
while woken=; wait "$step"; code=$?; [[ -n "$woken" ]]; do :; done

# The first node to fail names the cause: Slurm ends the others.
if [[ "$code" -ne 0 && -s "$NALANDA_EXIT_CODES" ]]; then
    read -r code <"$NALANDA_EXIT_CODES"
fi
if [[ -n "$terminated" && "$code" -eq 138 ]]; then
    code=143
fi
rm -f "$NALANDA_EXIT_CODES"

case "$code" in  # docs/runs.md has the table
    0 | 2 | 65 | 130 | 143)  # finished, bad input, diverged, or ended by hand
        rm -f "$failures"
        exit "$code"
        ;;
    138)  # SIGUSR1
        rm -f "$failures"
        why="out of time"
        ;;
    *)
        echo "$code" >>"$failures"
        count=$(wc -l <"$failures") limit="${NALANDA_REQUEUES:-10}"
        if ((count > limit)); then
            echo "exit code $code: failed $count times in a row, not requeued" >&2
            rm -f "$failures"
            exit "$code"
        fi
        why="exit code $code, failure $count of at most $limit in a row"
        ;;
esac
echo "$why: requeued, to resume from the checkpoint"
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
