"""The version, where every layer can compare it."""

__version__ = "0.1.0"
