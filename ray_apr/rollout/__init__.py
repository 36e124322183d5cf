"""Rollout: which sample runs next, its payload, its tokens' places, and the loops around them."""
