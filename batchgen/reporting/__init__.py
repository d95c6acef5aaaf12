"""What a person sees of a run: while it goes, and at its end."""
