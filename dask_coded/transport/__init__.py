"""Messages between workers over distributed's comms, independent of codes and rounds."""

from __future__ import annotations

from dask_coded.transport.channels import Answer, Channel
from dask_coded.transport.exchange import Exchange
from dask_coded.transport.rows import ANSWER_SECONDS

__all__ = ["ANSWER_SECONDS", "Answer", "Channel", "Exchange"]
