"""The package's version, stored here because code may run from its folder, not installed."""

__all__ = ["__version__"]

__version__ = "0.1.0"
