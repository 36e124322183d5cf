#!/usr/bin/env bash
# From the repository, set up on a file system that all nodes share: sbatch deploy/slurm.sh
#SBATCH --job-name=ray_apr
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=2
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=ray_apr-%j.log
set -euo pipefail

export PATH=$PWD/.venv/bin:$PATH # your environment, on the shared file system
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The address that the nodes meet at; where that is not the first one of this node, the other one.
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname -I | cut -d' ' -f1):6379

# Each node starts Ray and joins; the head runs what follows "--", and then all nodes stop Ray.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
	--cpus-per-task="$SLURM_CPUS_PER_TASK" \
	ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
	--num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_ON_NODE" \
	-- env RAY_ADDRESS="$address" \
	python -m ray_apr train examples/arithmetic/quickstart.yaml \
	--set rollout.engine.device=cuda \
	--set rollout.num_replicas=2 \
	--set scaling.num_workers=2 \
	--set scaling.use_gpu=true
