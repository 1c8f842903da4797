"""The version, where every layer can compare it."""

__version__ = "0.2.0"
