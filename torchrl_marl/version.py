"""The package's version, known without an installation: code may run from its folder."""

__all__ = ["__version__"]

__version__ = "0.1.0"
