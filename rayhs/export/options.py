"""Options of an exporter, as key=value pairs or keyword arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from rayhs.errors import ConfigError


class ExportOptions(BaseModel):
    """Base of every exporter's ``Options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("layers", mode="before", check_fields=False)
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """``2,15`` and ``2`` are lists of layers as well."""
        if isinstance(value, str):
            return [part.strip() for part in value.split(",")]
        return [value] if isinstance(value, int) else value


@dataclass(frozen=True)
class About:
    """What people are told of an exporter.

    Attributes:
        consumer: who reads it, with the version or date of what it was written after.
        needs: layers, packages or weights that must be there.
        writes: the files.
        converts: what is done to states, layer ids and masks on the way; "nothing" where nothing is.
    """

    consumer: str
    needs: str
    writes: str
    converts: str


T = TypeVar("T", bound=ExportOptions)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` texts, the values as YAML; raises ConfigError."""
    found = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {setting}: write it as key=value")
        try:
            found[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(f"--set {setting}: the value is not YAML; quote it if it is text") from None
    return found


def parse_options(kind: type[T], settings: Mapping[str, Any], consumer: str) -> T:
    """Raises ConfigError: an unknown option (the nearest is named) or a wrong value."""
    known = list(kind.model_fields)
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known) or 'none'}"
            raise ConfigError(f"export to {consumer}: unknown option {key!r}; {hint}")
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][:1]))
        if first["type"] == "missing":
            raise ConfigError(f"export to {consumer}: {where} is needed (--set {where}=...)") from None
        raise ConfigError(f"export to {consumer}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
