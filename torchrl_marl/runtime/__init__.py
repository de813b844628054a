"""The process: its random state, memory and ranks, and what it may trust, import and name."""
