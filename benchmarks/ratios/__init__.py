"""Ratios for `asv <https://asv.readthedocs.io>`_, which compares them between commits."""
