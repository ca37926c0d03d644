"""One line out of what an S3 server or the network answered: what, where, what to do next.

obstore tells a failure only as text (the server's XML and a dump of the error's sources), which is
searched here. Nothing of the text but the server's code and message is repeated: the rest can hold
access keys.
"""

from __future__ import annotations

import re

from rayhs.errors import ObjectNotFound, StoreError, StoreUnavailable
from rayhs.store.settings import S3Settings

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})</Message>")
_NETWORK = re.compile(r'(?:message|error): "([^"]{1,200})"')

_SIGNING = "check AWS_SECRET_ACCESS_KEY (or the profile's keys) and the clock"
_PROVIDER = re.compile(r"External AWS credential provider: (\w+)")
_KEYS = "check AWS_ACCESS_KEY_ID (or the profile) and the endpoint"
_RIGHTS = "check the keys, or have them allowed to read, write and list there"
_UNSAID = "check the keys, their rights and this machine's clock"  # to a HEAD no server says which
_ADVICE = {
    "SignatureDoesNotMatch": ("wrong secret key", _SIGNING),
    "InvalidAccessKeyId": ("unknown access key", _KEYS),
    "InvalidClientTokenId": ("unknown access key", _KEYS),
    "ExpiredToken": ("the session token has expired", "log in again, or renew AWS_SESSION_TOKEN"),
    "InvalidToken": ("the session token is not valid", "renew or unset AWS_SESSION_TOKEN"),
    "RequestTimeTooSkewed": ("the clock is off", "set this machine's clock"),
    "AccessDenied": ("access denied", _RIGHTS),
    "NoSuchBucket": ("no such bucket", "create it, or correct the bucket or the endpoint"),
    "PermanentRedirect": ("the bucket is in another region", "set storage.region or AWS_DEFAULT_REGION"),
    "AuthorizationHeaderMalformed": ("wrong region", "set storage.region or AWS_DEFAULT_REGION"),
    "QuotaExceeded": ("the quota is used up", "free some space or raise the quota"),
}


class RangesIgnoredError(StoreError):
    """The server answered a range request as if it had been one for the whole object."""


def was_answered(error: Exception) -> bool:
    """Whether a server answered at all."""
    return isinstance(error, FileNotFoundError) or _STATUS.search(str(error)) is not None


def explain(where: str, settings: S3Settings | None, error: Exception) -> StoreError:
    """The error to raise for what obstore raised at ``where`` (``s3://bucket/name``)."""
    text = str(error)
    if kind := _first(_PROVIDER, text):
        return StoreUnavailable(
            f"{where}: the credentials could not be renewed ({kind}); log in again or check the profile"
        )
    status, code = _first(_STATUS, text), _first(_CODE, text)
    if code == "NoSuchUpload":
        # Not an absent object: a request whose reply was lost has completed the upload, or somebody ended it.
        return StoreUnavailable(
            f"{where}: the multipart upload is gone (NoSuchUpload){_at(settings)}; run the same command again"
        )
    if isinstance(error, FileNotFoundError) and code not in _ADVICE:
        return ObjectNotFound(f"{where}: no such object{_at(settings)}; check the name and the endpoint")
    if status is not None or code in _ADVICE:
        return explain_answer(where, settings, int(status or 0), code, _first(_MESSAGE, text))
    if "non-partial response" in text:
        return RangesIgnoredError(
            f"{where}: the server ignores range requests{_at(settings)}; use another server or proxy"
        )
    if "redirect" in text.lower():
        cause, advice = _ADVICE["PermanentRedirect"]
        return StoreError(f"{where}: {cause}{_at(settings)}; {advice}")
    return _from_network(where, settings, text)


def explain_answer(
    where: str, settings: S3Settings | None, status: int, code: str | None, message: str | None
) -> StoreError:
    """The error to raise for an S3 server's error answer."""
    if code in _ADVICE:
        cause, advice = _ADVICE[code]
        return StoreError(f"{where}: {cause} ({code}){_at(settings)}; {advice}")
    said = ", ".join(part for part in (code, message) if part)
    answer = f"the server answered {status}" + (f" ({' '.join(said.split())})" if said else "")
    if status in (401, 403):
        advice = _RIGHTS if code else _UNSAID
    elif status == 416:
        advice = "the object is shorter than it should be: run rayhs verify"
    elif status == 429 or status >= 500:
        return StoreUnavailable(
            f"{where}: {answer} again and again{_at(settings)}; "
            "wait until the store is well and run the same command again"
        )
    else:
        advice = "check the URI and the endpoint"
    return StoreError(f"{where}: {answer}{_at(settings)}; {advice}")


def _from_network(where: str, settings: S3Settings | None, text: str) -> StoreError:
    lowered = text.lower()
    if "timedout" in lowered.replace(" ", "") or "deadline" in lowered:
        cause = "no answer in time"
    elif "certificate" in lowered:
        return StoreError(f"{where}: the server's certificate is not trusted{_at(settings)}; set AWS_CA_BUNDLE")
    elif "dns" in lowered:
        cause = "the host name is unknown"
    else:
        found = _NETWORK.findall(text)
        cause = " ".join(found[-1].split()) if found else "the connection failed"
    return StoreUnavailable(f"{where}: {cause}{_at(settings)}; check the endpoint (AWS_ENDPOINT_URL) and the network")


def _at(settings: S3Settings | None) -> str:
    if settings is None:
        return ""
    return f" at {settings.endpoint or 'AWS, region ' + settings.region}"


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None
