"""Trainings on a Dask cluster: a leader in a task, and trainers on the workers."""

from __future__ import annotations

from dask_coded.training.runtime.leader import lead
from dask_coded.training.runtime.scheduler import TrainingSchedulerPlugin

__all__ = ["TrainingSchedulerPlugin", "lead"]
