"""Messages between workers, on distributed's comms: knows workers, but neither codes nor rounds."""

from __future__ import annotations

from dask_coded.transport.channels import Answer, Channel, Exchange

__all__ = ["Answer", "Channel", "Exchange"]
