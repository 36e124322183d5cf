"""A discrete-event model of a run that drives the real scheduling code."""
