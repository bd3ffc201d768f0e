"""What can go wrong while workers talk. Mistakes in a call raise ``ValueError``."""

from __future__ import annotations


class ExchangeError(RuntimeError):
    """An exchange failed, on this worker or another; the message names method, bucket and rank."""
