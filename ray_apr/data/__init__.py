"""Prompts on the way in, the sample buffer, and the batches on the way to the trainer."""
