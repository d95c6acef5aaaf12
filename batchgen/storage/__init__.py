"""The run directory: what is done, and how it comes to be there."""
