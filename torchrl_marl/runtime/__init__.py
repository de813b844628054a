"""Process-level services: random state, memory, ranks, trust, import path and names."""
