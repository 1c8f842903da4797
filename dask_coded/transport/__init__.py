"""Messages between workers over distributed's comms, independent of codes and rounds."""

from __future__ import annotations

from dask_coded.transport.channels import ANSWER_SECONDS, Answer, Channel, Exchange

__all__ = ["ANSWER_SECONDS", "Answer", "Channel", "Exchange"]
