"""What runs next, what trains next, and where. Pure: no I/O, no clock, no ray, no torch."""
