"""The rollout worker: loops around the scheduler, calls of samples, rewards, evaluation."""
