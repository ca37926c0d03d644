"""What the JSON records of a dataset have in common: validated when read, and sealed by a checksum."""

from __future__ import annotations

import re
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from rayhs.errors import FormatError

_SEAL_BYTES = 38
_SEAL = re.compile(rb',"record_checksum":"([0-9a-f]{16})"\}')


class Record(BaseModel):
    """A JSON object of the dataset; unknown keys of later minor versions are ignored.

    Stored, its last key is its seal, the 38 bytes ``,"record_checksum":"<16 hex>"}`` at the very end.
    The checksum is xxh3_64 (seed 0, lower-case hex) of the bytes before the seal followed by one
    ``}``: of the JSON as it was before the key was added, byte for byte.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        return seal(self.model_dump_json(exclude_none=True).encode())

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Any:
        """Parse and validate; ``name`` is the object's name, for the message.

        Raises:
            FormatError: not JSON, a missing key, a wrong type, values that contradict, or a byte
                that is not as it was written.
        """
        try:
            record = cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise FormatError(f"{name}: {where}: {first['msg']}") from None
        # After the values: what a field has wrong says more than that something is.
        _check_seal(data, name)
        return record


def seal(document: bytes) -> bytes:
    """Append the checksum to a JSON object that has none and at least one key."""
    return document[:-1] + f',"record_checksum":"{xxhash.xxh3_64_hexdigest(document)}"}}'.encode()


def _check_seal(data: bytes, name: str) -> None:
    found = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if found is None:
        problem = "no record_checksum at its end"
    elif xxhash.xxh3_64_hexdigest(data[:-_SEAL_BYTES] + b"}") != found[1].decode():
        problem = "differs from its record_checksum"
    else:
        return
    raise FormatError(f"{name}: {problem}: damaged or edited; rayhs extract (or import) --repair makes it anew")
