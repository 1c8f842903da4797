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
from dask_coded.aggregation._squeeze import (
    Squeeze,
    SqueezeMachine,
    SqueezePlan,
)
from dask_coded.aggregation._tree import TreePlan
from dask_coded.aggregation._units import ComputeUnit, FinishedUnits, UnitSum

__all__ = [
    "AGGREGATIONS",
    "ROOT",
    "Aggregation",
    "CodedReduce",
    "Command",
    "Compute",
    "ComputeUnit",
    "DynamicClusters",
    "Finished",
    "FinishedUnits",
    "GradientCoding",
    "Machine",
    "Plan",
    "Ring",
    "Send",
    "Squeeze",
    "SqueezeMachine",
    "SqueezePlan",
    "Star",
    "StaticClusters",
    "Tag",
    "Tree",
    "TreePlan",
    "UnitSum",
]
