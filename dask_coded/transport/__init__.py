"""Messages between workers, on distributed's comms: knows workers, but neither codes nor rounds."""

from __future__ import annotations

from dask_coded.transport.channels import ANSWER_SECONDS, Answer, Channel, Exchange

__all__ = ["ANSWER_SECONDS", "Answer", "Channel", "Exchange"]
