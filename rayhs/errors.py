"""Every error rayhs raises on purpose, with the exit code the command line gives it.

Exit codes: 0 done; 1 failed; 2 usage or config; 3 finished, some samples failed or were rejected;
4 verify found damage; 130 interrupted. A message is one line: what, where, what to do next.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SOME_FAILED = 3
EXIT_DAMAGE = 4
EXIT_INTERRUPTED = 130

REPAIR_HINT = "rayhs verify names all damage, rayhs extract (or import) --repair makes it anew"


class RayhsError(Exception):
    """Base class; ``exit_code`` is what the command line exits with.

    Messages quote names and values out of stored objects and other people's errors: what could break
    the line, move the cursor or fill the screen is taken out here, once for all of them.

    Example:
        >>> try:
        ...     rayhs.open("nothing-here")
        ... except rayhs.RayhsError as error:
        ...     type(error).__name__, error.exit_code
        ('ObjectNotFound', 1)
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ConfigError(RayhsError):
    """The run file, an option or an argument is wrong."""

    exit_code = EXIT_USAGE


class InputError(RayhsError):
    """The prompts can't be read at all: missing path, missing column, empty input."""

    exit_code = EXIT_USAGE


class IdentityMismatch(RayhsError):
    """The output already holds a dataset of another model, template, layer list or plan."""

    exit_code = EXIT_USAGE


class UnsupportedVersion(RayhsError):
    """An installed vLLM, Ray or Python is outside the supported range."""

    exit_code = EXIT_USAGE


class TooManyRejected(RayhsError):
    """The share of rejected prompts is over the configured limit; nothing was extracted."""

    exit_code = EXIT_SOME_FAILED


class StoreError(RayhsError):
    """The object store refused, or failed for good after the retries that made sense.

    Bare, it is permanent: the same request would be refused again (rights, names, quota, a full disk).
    """


class StoreUnavailable(StoreError):
    """What usually passes did not pass in time: no answer, throttling, a server's own error. Trying later helps."""


class ObjectNotFound(StoreError):
    """The object does not exist."""


class FormatError(RayhsError):
    """An object of a dataset is not what its format says (truncated, corrupt or hostile)."""


class IncompleteDataset(RayhsError):
    """The dataset has no summary yet: its run has not finished."""


class EngineError(RayhsError):
    """The engine could not start, or died and could not be started again."""


class TooManyFailed(RayhsError):
    """So many samples failed one after the other that the model or the machine must be broken."""


class SampleError(RayhsError):
    """One sample could not be extracted; its message, ``category: details``, becomes the sample's ``reason``."""


class PromptRejected(RayhsError):
    """One prompt can't become a sample; its message becomes the row's ``reason``."""


def printable(text: str, limit: int = 2000) -> str:
    """``text`` without line breaks or control characters; of a longer one, the middle is left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return "".join(c if c.isprintable() else " " for c in text)


def one_line(error: object, limit: int = 500) -> str:
    """A message on one line, whatever its source, cut to ``limit`` characters."""
    return " ".join(str(error).split())[:limit]


def first_line(error: BaseException) -> str:
    """An exception of other people's code as one line: its type, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
