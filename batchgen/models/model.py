"""The model a job names, as files: where they lie, what identifies them, how long its context is.

Nothing here imports transformers. A folder is taken as it is; a name on the Hub is resolved to one commit.
"""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from batchgen.errors import ConfigError
from batchgen.models import hub

# Everything that decides how text becomes tokens and back; weights are identified by name and size.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_WANTED = hub.Wanted("engine.args.model", _SMALL_FILES, need=("config.json", "tokenizer*"))
_DEMO = "for the small demo model: batchgen demo-model models/smollm2-135m-instruct"
# Written by tools, read by nobody when text is made.
_IGNORED = {"README.md", "trainer_state.json", "training_args.json"}


@dataclass(frozen=True)
class Model:
    """name: what vLLM is told. folder: where config and tokenizer lie. revision: the Hub's commit, or None."""

    name: str
    folder: Path
    revision: str | None

    @cached_property
    def config(self) -> dict[str, Any]:
        file = self.folder / "config.json"
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise ConfigError(f"{file}: no model configuration: {e}") from e
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: no model configuration: it holds no object")
        return value

    @property
    def max_position_embeddings(self) -> int | None:
        return self._number("max_position_embeddings")

    @property
    def hidden_size(self) -> int | None:
        return self._number("hidden_size")

    @property
    def parameters(self) -> int | None:
        """About how many it has, from its configuration; None for shapes that are none of a plain decoder's."""
        names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
        sizes = [self._number(name) for name in names]
        experts = ("num_experts", "num_local_experts", "n_routed_experts")
        if None in sizes or any(self._number(name) for name in experts):
            return None
        hidden, layers, between, vocabulary, heads = (size or 0 for size in sizes)
        width = self._number("head_dim") or hidden // max(1, heads)
        kv_heads = self._number("num_key_value_heads") or heads
        attention = 2 * hidden * width * (heads + kv_heads)
        tied = (self.config.get("text_config") or self.config).get("tie_word_embeddings", True)
        return layers * (attention + 3 * hidden * between) + vocabulary * hidden * (1 if tied else 2)

    def _number(self, name: str) -> int | None:
        text = self.config.get("text_config") or self.config
        value = text.get(name)
        return value if isinstance(value, int) else None

    @cached_property
    def chat_template(self) -> str | None:
        """The text of the chat template that lies beside the tokenizer; None where there is none."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "chat_template.jinja").read_text(encoding="utf-8")
        file = self.folder / "tokenizer_config.json"
        try:
            value = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError) as e:
            raise ConfigError(f"{file}: no tokenizer configuration: {e}") from e
        if isinstance(value, list):  # several by name
            named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
            value = named.get("default")
        return value if isinstance(value, str) else None

    def identity(self) -> dict[str, str]:
        """SHA-256 of each small file and the size of each weight file, by name; the revision where there is one."""
        found: dict[str, str] = {"revision": self.revision} if self.revision else {}
        for file in sorted(self.folder.iterdir()):
            if file.name in _IGNORED or not file.is_file():
                continue
            if any(file.match(pattern) for pattern in _SMALL_FILES):
                found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
            elif file.suffix in _WEIGHTS and self.revision is None:
                found[file.name] = f"{file.stat().st_size} bytes"
        return found

    def check_weights(self) -> None:
        """Raise ConfigError where the engine will find no weights, or not all: told before minutes of starting."""
        if self.revision is not None and not hub.offline():
            return  # vLLM downloads them
        missing = self._missing_weights()
        if missing is None:
            return
        if self.revision is None:
            raise ConfigError(f"engine.args.model: {self.folder}: the folder does not hold {missing}")
        raise ConfigError(
            f"engine.args.model: {self.name}: the local cache ({self.folder}) does not hold {missing}, and "
            f"HF_HUB_OFFLINE forbids to ask the Hub. Where there is a network, run: "
            f"{hub.download(self.name, self.revision)}"
        )

    def _missing_weights(self) -> str | None:
        # `exists`: a cache can hold links whose files are gone.
        held = {file.name for file in self.folder.iterdir() if file.suffix in _WEIGHTS and file.exists()}
        try:
            index = json.loads((self.folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
            missing = sorted(set(index["weight_map"].values()) - held)
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            missing = []
        if missing and not any(name.startswith("consolidated") for name in held):  # vLLM prefers these
            return f"{len(missing)} of its weight files ({missing[0]}{', …' if len(missing) > 1 else ''})"
        return None if held else f"weights ({', '.join(_WEIGHTS)})"


def resolve(name: str, revision: str | None) -> Model:
    """The model `engine.args.model` names. Raises ConfigError where it is neither a folder nor on the Hub."""
    try:
        folder, commit = hub.locate(name, revision, _WANTED)
    except ConfigError as e:
        demo = name.count("/") != 1 or name.startswith((".", "/", "~", "models/"))
        raise ConfigError(f"{e}; {_DEMO}" if demo else str(e)) from e
    return Model(name if commit else str(folder), folder, commit)
