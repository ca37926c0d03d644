"""rayhs: prompts in, verified hidden states in an object store out.

`extract` runs the pipeline, `open` reads a dataset back. Importing this package loads neither Ray,
vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Dataset", "RayhsError", "Sample", "__version__", "extract", "open", "pad_collate"]

if TYPE_CHECKING:
    from rayhs.dataset import Dataset, Sample
    from rayhs.dataset import open_dataset as open
    from rayhs.errors import RayhsError
    from rayhs.pipeline import extract
    from rayhs.views.torch import pad_collate

_HOMES = {
    "Dataset": ("rayhs.dataset", "Dataset"),
    "Sample": ("rayhs.dataset", "Sample"),
    "RayhsError": ("rayhs.errors", "RayhsError"),
    "open": ("rayhs.dataset", "open_dataset"),
    "extract": ("rayhs.pipeline", "extract"),
    "pad_collate": ("rayhs.views.torch", "pad_collate"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayhs' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
