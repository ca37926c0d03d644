"""Layer ids: which residual streams of the model are stored.

Id ``k`` is the residual stream after ``k`` decoder layers, vLLM's convention: 0 is the embedding
output and ``n`` (the number of decoder layers) the last state, before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayhs.errors import ConfigError

LayerSpec = str | int | Sequence[str | int]

PRESETS = {
    "eagle3": "2, n//2, n-3 (vLLM's and speculators' default for EAGLE-3)",
    "dflash": "five layers spread evenly over 2..n-2 (DFlash's target_layer_ids, shifted to rayhs' ids)",
    "all": "0..n",
    "last": "n",
}
_DFLASH_DRAFT_LAYERS = 5


def resolve_layers(spec: LayerSpec, num_layers: int) -> tuple[int, ...]:
    """Turn presets and ids into sorted, unique layer ids; see `layers_as_named`."""
    return tuple(sorted(set(layers_as_named(spec, num_layers))))


def refuse_disorder(layers: Sequence[int], whose: str) -> None:
    """Raises ConfigError where ``layers`` are not ascending, each once, as ``whose`` states always are.

    Sorting them silently would hand out one layer's states for another's wherever they are told apart by their place.
    """
    right = sorted(set(layers))
    if list(layers) != right:
        raise ConfigError(f"layers {list(layers)}: {whose} have them ascending, each once; give {right}")


def layers_as_named(spec: LayerSpec, num_layers: int) -> tuple[int, ...]:
    """Turn presets and ids into layer ids, in the order in which they are named, repeats included.

    Args:
        spec: a preset, an id, or a list mixing both; negative ids count from ``n`` (-1 is ``n``).
        num_layers: ``n``, the model's number of decoder layers.

    Raises:
        ConfigError: an unknown preset, an id outside 0..n, an empty list, or a model too small
            for a preset.
    """
    items = [spec] if isinstance(spec, (str, int)) else list(spec)
    if not items:
        raise ConfigError("layers: the list is empty; name at least one layer id or a preset")
    return tuple(layer for item in items for layer in _resolve_one(item, num_layers))


def _resolve_one(item: str | int, n: int) -> tuple[int, ...]:
    if isinstance(item, bool) or not isinstance(item, (str, int)):
        raise ConfigError(f"layers: {item!r} is neither a layer id nor a preset ({', '.join(PRESETS)})")
    if isinstance(item, int):
        layer = n + 1 + item if item < 0 else item
        if not 0 <= layer <= n:
            raise ConfigError(f"layers: id {item} is outside 0..{n} (the model has {n} decoder layers)")
        return (layer,)
    if item == "all":
        return tuple(range(n + 1))
    if item == "last":
        return (n,)
    if item == "eagle3":
        if n < 4:
            raise ConfigError(f"layers: eagle3 needs at least 4 decoder layers, the model has {n}; list ids instead")
        return (2, n // 2, n - 3)
    if item == "dflash":
        return _dflash(n)
    raise ConfigError(f"layers: unknown preset {item!r}; known are {', '.join(PRESETS)} and ids 0..{n}")


def _dflash(n: int) -> tuple[int, ...]:
    # DFlash's build_target_layer_ids: round(1 + i * (n - 4) / (draft_layers - 1)), 0-based layer
    # outputs, hence + 1 here.
    least = 4 + _DFLASH_DRAFT_LAYERS
    if n < least:
        raise ConfigError(f"layers: dflash needs at least {least} decoder layers, the model has {n}; list ids instead")
    steps = _DFLASH_DRAFT_LAYERS - 1
    return tuple(round(1 + i * (n - 4) / steps) + 1 for i in range(_DFLASH_DRAFT_LAYERS))
