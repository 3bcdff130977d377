#!/bin/bash
# Compare LoRA ranks with a job array: one job per rank, as many at a time as the cluster has room
# for. Submit it in the folder in which you would train; overrides apply to every job:
#   sbatch examples/recipes/slurm-lora-ranks/job.sh mine.yaml learning_rate=2e-4
#SBATCH --job-name=lora-ranks
#SBATCH --array=0-2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --time=4:00:00
#SBATCH --output=%x-%A-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120

ranks=(8 16 64)
rank=${ranks[$SLURM_ARRAY_TASK_ID]}

# On SIGTERM (time limit or preemption) the run writes a checkpoint and ends with exit code 143.
# The same command resumes from it.
srun paceline sft "$@" lora.enable=true "lora.rank=$rank" "output_dir=output/lora-ranks/rank-$rank"
code=$?
if [ "$code" -eq 143 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
