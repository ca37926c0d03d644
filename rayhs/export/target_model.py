"""The model whose states were extracted: its vocabulary, final norm and output projection, and no other weights."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rayhs.codec import Array
from rayhs.config import fake_shape
from rayhs.errors import ConfigError, one_line
from rayhs.final_norm import final_norm
from rayhs.layout import DatasetRecord
from rayhs.model import config_hash, model_hash

if TYPE_CHECKING:
    import torch

# Logits are more than lm_head of the normed state in models that have one of these.
_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"


class TargetModel:
    """Reads what is asked for: the configuration or single tensors. Computes in float32 on the CPU."""

    def __init__(self, record: DatasetRecord, name: str | None = None) -> None:
        """``name``: a folder or hub id, where the model is no longer at the one in ``dataset.json``."""
        self._record = record
        self._name = name or record.model
        self._lock = threading.Lock()
        self._revision = record.revision if name is None else None
        if fake_shape(self._name):
            raise ConfigError(f"model {self._name}: the fake engine has no weights; this export needs those of a model")

    @property
    def name(self) -> str:
        """The folder or hub id it is read from."""
        return self._name

    @cached_property
    def config(self) -> Any:
        """The transformers configuration of the language model.

        Raises:
            ConfigError: it can't be read, or is that of another model.
        """
        from transformers import AutoConfig

        if self.name.startswith(("/", ".", "~")) and not os.path.isdir(self.name):
            raise ConfigError(f"model {self.name}: no such folder; say where it is now (--set model=...)")

        try:
            whole = AutoConfig.from_pretrained(self._name, revision=self._revision, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model {self._name}: {one_line(error, 200)}; if it has moved, say where (--set model=...)"
            ) from None
        self._refuse_another(whole)
        return whole

    def _refuse_another(self, whole: Any) -> None:
        from transformers import __version__

        text, record = whole.get_text_config(), self._record
        if (text.num_hidden_layers, text.hidden_size) != (record.num_layers, record.hidden_size):
            raise ConfigError(
                f"model {self._name}: {text.num_hidden_layers} layers of {text.hidden_size}, the states are of "
                f"{record.num_layers} layers of {record.hidden_size}; give the model they were extracted from"
            )
        # Another transformers may write another configuration of the same model.
        same_reader = record.versions.get("transformers") == __version__
        # The hash of one that came from the hub is that of its configuration alone, wherever it is now.
        if same_reader and record.model_hash not in (model_hash(self._name, whole), config_hash(whole)):
            raise ConfigError(
                f"model {self._name}: its configuration or weights are not those the states were extracted from; "
                "give that model (--set model=...)"
            )

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    def vocab_size_over(self, draft_size: int) -> int:
        """`vocab_size`; raises ConfigError where the draft is to have more."""
        if draft_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size: {draft_size} is over the model's {self.vocab_size}; give less")
        return self.vocab_size

    @property
    def special_tokens(self) -> list[int]:
        """Ids of the tokens that begin, end and pad a text, where the configuration has them."""
        config = self.config.get_text_config()
        found = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
        ids = [token for one in found for token in (one if isinstance(one, list) else [one])]
        return [token for token in dict.fromkeys(ids) if token is not None and 0 <= token < self.vocab_size]

    def normed(self, states: Array) -> Array:
        """The final norm of states `[tokens, hidden]`: float32 `[tokens, hidden]`. Any number of threads."""
        import torch

        with self._lock:
            norm = self._norm
        with torch.inference_mode():
            result: Array = norm(torch.from_numpy(states.astype(np.float32))).numpy()
        return result

    def logits(self, normed: Array) -> Array:
        """The output projection of `normed` states: float32 `[tokens, vocabulary]`.

        Raises:
            ConfigError: the model does more to its logits than project.
        """
        import torch

        for key in _SCALES:
            if getattr(self.config.get_text_config(), key, None) not in (None, 1, 1.0):
                raise ConfigError(f"model {self._name}: it has {key}, which this export can't apply")
        with torch.inference_mode():
            result: Array = torch.nn.functional.linear(torch.from_numpy(normed), *self._head).numpy()
        return result

    @cached_property
    def embeddings(self) -> torch.Tensor:
        """The input embeddings `[vocabulary, hidden]`, in the checkpoint's dtype."""
        module = self._network.get_input_embeddings()
        return self._tensor(f"{self._name_of(module)}.weight")

    @cached_property
    def _network(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)

    @cached_property
    def _norm(self) -> torch.nn.Module:
        name, norm = final_norm(self._network)
        weights = {key: self._tensor(f"{name}.{key}").float() for key in norm.state_dict()}
        norm.load_state_dict(weights, assign=True)
        return norm.eval()

    @cached_property
    def _head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        head = self._network.get_output_embeddings()
        if head is None:
            raise ConfigError(f"model {self._name}: it has no output projection")
        name = self._name_of(head)
        # Tied ones are stored once, under either name.
        tied = self.config.get_text_config().tie_word_embeddings and f"{name}.weight" not in self._files
        weight = self.embeddings if tied else self._tensor(f"{name}.weight")
        bias = self._tensor(f"{name}.bias").float() if head.bias is not None else None
        return weight.float(), bias

    def _name_of(self, module: Any) -> str:
        name: str = next(name for name, one in self._network.named_modules() if one is module)
        return name

    @cached_property
    def _files(self) -> dict[str, str]:
        """The name of each tensor's file; of the files themselves, none but an index is fetched here."""
        index = self._cached(_INDEX)
        if index is not None:
            try:
                with open(index, encoding="utf-8") as file:
                    return dict(json.load(file)["weight_map"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"model {self._name}: {index}: not an index of weights; fetch the model again"
                ) from None
        path = self._cached(_WEIGHTS)
        if path is None:
            raise ConfigError(
                f"model {self._name}: it has no safetensors weights; save it with transformers "
                "(save_pretrained) and give that folder (--set model=...)"
            )
        with self._opened(path) as whole:
            return dict.fromkeys(whole.keys(), _WEIGHTS)

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model {self._name}: {path}: {one_line(error)}; fetch the model again") from None

    def _cached(self, name: str) -> str | None:
        from transformers.utils import cached_file

        try:
            path: str | None = cached_file(
                self._name, name, revision=self._revision, _raise_exceptions_for_missing_entries=False
            )
        except OSError as error:
            raise ConfigError(f"model {self._name}: {one_line(error, 200)}") from None
        return path

    def _tensor(self, name: str) -> torch.Tensor:
        # A checkpoint of the base model alone has its tensors without that prefix.
        names = (name, name.removeprefix(f"{self._network.base_model_prefix}."))
        found = next((one for one in names if one in self._files), None)
        if found is None:
            raise ConfigError(f"model {self._name}: its checkpoint has no tensor {name}; give a whole one")
        path = self._cached(self._files[found])
        if path is None:
            raise ConfigError(f"model {self._name}: {self._files[found]} is missing; fetch the model again")
        with self._opened(path) as file:
            tensor: torch.Tensor = file.get_tensor(found)
        return tensor
