"""Values and rules that all parts of a run share: standard library only."""
