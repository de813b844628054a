"""The package's version, stored here because the package may be used without installing it."""

__all__ = ["__version__"]

__version__ = "0.2.0"
