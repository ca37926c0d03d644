"""A connector that leaves the states in the cache: what extraction costs before anything is copied."""

from __future__ import annotations

from typing import Any

from rayhs.connector import HiddenStatesConnector


class CarriesNothing(HiddenStatesConnector):
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        return None
