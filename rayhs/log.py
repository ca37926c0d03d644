"""One logger for the package: ``RAYHS_LOG`` sets its level (default WARNING)."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("rayhs")


def configure() -> None:
    """Send rayhs' log lines to standard error; called by the command line and by actors."""
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s rayhs: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("RAYHS_LOG", "WARNING").upper())
    logger.propagate = False
