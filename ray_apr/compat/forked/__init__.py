"""Ray's worker processes, forked from processes that have imported what they need."""
