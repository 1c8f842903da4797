"""Sums of gradients over uneven workers: who sends what to whom, as machines without I/O."""

from dask_coded.aggregation._choices import Star
from dask_coded.aggregation._machine import (
    ROOT,
    Aggregation,
    Command,
    Compute,
    Finished,
    Machine,
    Plan,
    Send,
    Tag,
)
from dask_coded.aggregation._ring import Ring

__all__ = [
    "ROOT",
    "Aggregation",
    "Command",
    "Compute",
    "Finished",
    "Machine",
    "Plan",
    "Ring",
    "Send",
    "Star",
    "Tag",
]
