"""One run: what it is made of, and what is checked before it starts."""
