"""The two sides of the loop: a reader ahead of the engine, and the feed that keeps the engine full."""
