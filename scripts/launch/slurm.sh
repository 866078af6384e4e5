#!/bin/bash
# A training job on 4 nodes that requeues itself: sbatch scripts/launch/slurm.sh. Change what is in capitals.
#SBATCH --job-name=dense
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue            # also after a node failure: the job resumes from its newest checkpoint
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180    # SIGTERM to the tasks 3 minutes before the time limit: they save and exit with 42
set -u

srun --kill-on-bad-exit=0 .venv/bin/spmd-tasks --exp lm.Dense1B --mode train --job_log_dir /SHARED/runs/dense
code=$?  # the largest exit code of all tasks
case "$code" in
  42 | 43 | 44 | 143)  # preempted, stuck, a peer failed; 143: SIGTERM before Python had started
    scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit "$code"
