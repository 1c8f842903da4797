"""Aggregations: how workers of uneven speed sum their gradients, as state machines without I/O."""

from dask_coded.aggregation._choices import CodedReduce, GradientCoding, Star, Tree
from dask_coded.aggregation._clusters import DynamicClusters, StaticClusters
from dask_coded.aggregation._machine import (
    AGGREGATIONS,
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
from dask_coded.aggregation._speculation import Speculation
from dask_coded.aggregation._tree import TreePlan

__all__ = [
    "AGGREGATIONS",
    "ROOT",
    "Aggregation",
    "CodedReduce",
    "Command",
    "Compute",
    "DynamicClusters",
    "Finished",
    "GradientCoding",
    "Machine",
    "Plan",
    "Ring",
    "Send",
    "Speculation",
    "Star",
    "StaticClusters",
    "Tag",
    "Tree",
    "TreePlan",
]
