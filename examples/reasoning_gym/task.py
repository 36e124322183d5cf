"""The reward: the score of the prompt's own task."""

from ray_apr.rewards import reasoning_gym_score

reward = reasoning_gym_score()
