"""Moving weights from the trainer to the rollout servers."""
