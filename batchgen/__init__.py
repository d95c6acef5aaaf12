"""Summaries for piles of documents through vLLM's offline engine, resumable after any kill."""

__version__ = "0.1.0"
