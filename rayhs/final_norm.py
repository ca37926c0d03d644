"""Where a transformers model has its final norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayhs.errors import ConfigError

if TYPE_CHECKING:
    import torch


def final_norm(network: torch.nn.Module) -> tuple[str, torch.nn.Module]:
    """Name and module of the norm after the last decoder layer: the base model's last norm outside any layer list.

    Raises:
        ConfigError: there is none.
    """
    import torch

    base = getattr(network, "base_model", network)
    names = {module: name for name, module in network.named_modules()}
    inside = tuple(name for name, module in base.named_modules() if isinstance(module, torch.nn.ModuleList))
    norms = [
        module
        for name, module in base.named_modules()
        if "norm" in type(module).__name__.lower() and not any(name.startswith(f"{i}.") for i in inside)
    ]
    if not norms:
        raise ConfigError(f"no final norm found in {type(network).__name__}")
    return names[norms[-1]], norms[-1]
