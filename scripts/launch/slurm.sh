#!/bin/bash
# A supervised job on 3 to 4 nodes: sbatch scripts/launch/slurm.sh. Change what is in capitals.
#SBATCH --job-name=dense
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --no-kill            # the allocation outlives a node that fails: the job goes on with the others
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180    # SIGTERM to the tasks 3 minutes before the time limit: they save and leave with code 42
set -u

srun --no-kill --kill-on-bad-exit=0 .venv/bin/spmd-tasks --exp lm.Dense1B --mode train \
  --job_log_dir /SHARED/runs/dense --supervise 3:4
code=$?  # the largest of all tasks: 45 if a node was left out, as a device computed wrongly. Submit again with --exclude
if [ "$code" -eq 42 ] || [ "$code" -eq 143 ]; then  # 143: SIGTERM before Python had begun
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
