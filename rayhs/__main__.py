"""``python -m rayhs``."""

from __future__ import annotations

from rayhs.cli import main

if __name__ == "__main__":
    main()
