"""Reads a model's linear layers from the config.json beside its weights. It downloads nothing."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegemm.describe.problem import normalize_dtype
from tunegemm.describe.workload.blocks import completed, is_read, layers_of
from tunegemm.describe.workload.matrices import Config, Layer, Linear
from tunegemm.describe.workload.products import FORMAT
from tunegemm.errors import BadValueError, ProblemError, WorkloadError
from tunegemm.files import read_text
from tunegemm.untrusted import decoded, line, shown


@dataclass(frozen=True)
class Model:
    """A model's products according to its config."""

    layers: tuple[Layer, ...]
    """The layers of all blocks, in order, then the logits."""
    dtype: str
    """Dtype of weights and activations that are not quantised: bf16, fp16 or fp32."""
    quantization: Mapping[str, Any]
    """Its ``quantization_config``; empty without one."""
    where: str


def read_model(name: str) -> Model:
    """The model of a config.json, of a folder with one, or of a name in the local cache: ``org/model``.

    Raises WorkloadError if there is none, or if its family is unknown.
    """
    path = _find(name)
    text = read_text(path, WorkloadError)
    try:
        if not text.strip():
            raise BadValueError("the file is empty")
        document = decoded(text)
        if not isinstance(document, dict):
            raise BadValueError("it is not an object")
    except BadValueError as error:
        raise WorkloadError(
            f"{path}: not a model's config.json ({error}); give the model's own, or its folder"
        ) from None
    if document.get("format") == FORMAT:
        command = f"tunegemm tune --from {shlex.quote(str(path))}"
        raise WorkloadError(f"{path}: a list of shapes, not a model's config; tune it with: {command}")
    config = _text_model(Config(document, str(path)))
    if not is_read(config):
        arguments = document.get("architectures") or document.get("model_type")
        named = arguments[0] if isinstance(arguments, list) and arguments else arguments
        who = shown(named) if named else "a model without a model_type"
        raise WorkloadError(
            f"{path}: {who} is not known: its config lacks the fields of a decoder with gated "
            "layers; use `tunegemm record`, which counts the products of any program"
        )
    layers, values = layers_of(config), config.values
    vocabulary = config.number("vocab_size")
    # Its columns are padded before they are divided, by the engine.
    layers.append(Layer("logits", (Linear("lm_head", vocabulary, config.number("hidden_size")),)))
    texts = (item.get(key) for item in (values, document) for key in ("dtype", "torch_dtype"))
    text = next(filter(None, texts), "bf16")
    try:
        if (dtype := normalize_dtype(line(text, "dtype", 40))) not in ("bf16", "fp16", "fp32"):
            raise BadValueError(f"dtype {text} is not a model's dtype")
        quantization = _quantization(document, values) or _beside(path)
    except (BadValueError, ProblemError) as error:
        raise WorkloadError(f"{path}: {error}") from None
    return Model(tuple(layers), dtype, quantization, str(path))


def _quantization(*documents: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config's entry about its quantisation; compressed-tensors and MLX have other names for it."""
    for document in documents:
        for name in ("quantization_config", "compression_config", "quantization"):
            if result := document.get(name):
                if not isinstance(result, dict):
                    raise BadValueError(f"{name} is not an object")
                return result
    return {}


#: Files beside a config.json that describe its quantisation, and the method if they do not name it.
_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def _beside(path: Path) -> Mapping[str, Any]:
    """The quantisation of a model whose config.json does not mention it, as engines find it."""
    for name, method in _BESIDE.items():
        if (other := path.with_name(name)).is_file():
            try:
                document = decoded(read_text(other, WorkloadError))
                inner = document.get("quantization", document) if isinstance(document, dict) else None
                if not isinstance(inner, dict):
                    raise BadValueError("not an object")
            except BadValueError as error:
                raise WorkloadError(f"{other}: {error}; download it again, as config.json") from None
            return {"quant_method": method, **inner}
    return {}


#: The fields of a multimodal model's config that hold its language model.
_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")


def _text_model(config: Config) -> Config:
    """The config of the language model in it, completed with omitted fields."""
    inner = next((value for name in _NESTED if isinstance(value := config.get(name), dict)), None)
    if inner is None:
        return completed(config)
    return _text_model(Config(inner, config.where))


def _find(name: str) -> Path:
    path = _expanded(name)
    if path.is_dir():
        path = path / "config.json"
    if path.exists() or name.endswith(".json"):
        return path  # reading reports any fault
    cached = _cache() / f"models--{name.replace('/', '--')}"
    if not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name, re.ASCII) or not cached.is_dir():
        raise WorkloadError(
            f"{shown(name)}: neither a config.json, a folder with one, nor a model in {_cache()}; download "
            "its config.json first; tunegemm downloads nothing"
        )
    head = cached / "refs" / "main"
    revisions = [read_text(head).strip()] if head.is_file() else []
    revisions += sorted(item.name for item in (cached / "snapshots").glob("*"))
    for revision in revisions:
        if (result := cached / "snapshots" / revision / "config.json").is_file():
            return result
    raise WorkloadError(f"{cached}: no config.json in it; download the model's config.json first")


def _cache() -> Path:
    """The folder of Hugging Face's downloads."""
    if hub := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return _expanded(hub)
    home = os.environ.get("HF_HOME")
    caches = _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return (_expanded(home) if home else caches / "huggingface") / "hub"


def _expanded(path: str) -> Path:
    """A path with a home in place of ``~``; as it is if there is no such user."""
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)
