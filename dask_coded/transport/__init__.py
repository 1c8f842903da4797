"""Messages between workers over distributed's comms, independent of codes and rounds."""

from __future__ import annotations

from dask_coded.transport.channels import Answer, Channel
from dask_coded.transport.exchange import Exchange

__all__ = ["Answer", "Channel", "Exchange"]
