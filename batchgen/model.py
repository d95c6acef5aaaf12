"""The model a job names, as files: where they lie, what identifies them, how long its context is.

Nothing here imports transformers. A folder is taken as it is; a name on the Hub is resolved to one commit, from the
local cache where it holds one, so that every attempt of a run means the same files.
"""

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from batchgen.errors import ConfigError

# Everything that decides how text becomes tokens and back; weights are identified by name and size.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
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
        text = self.config.get("text_config") or self.config
        value = text.get("max_position_embeddings")
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


def resolve(name: str, revision: str | None) -> Model:
    """The model `engine.args.model` names. Raises ConfigError where it is neither a folder nor on the Hub."""
    folder = Path(os.path.expanduser(name))  # noqa: PTH111  Path's own raises for a user that is not there
    if folder.is_dir():
        return Model(str(folder), folder, None)
    no_folder = f"engine.args.model: {name}: no such folder (working directory {Path.cwd()})"
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"{no_folder}; {_DEMO}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = {"repo_id": name, "revision": revision, "allow_patterns": list(_SMALL_FILES)}
    try:
        snapshot = snapshot_download(**wanted, local_files_only=True)
    except HFValidationError as e:
        raise ConfigError(f"{no_folder}, and no name the Hub could have; {_DEMO}") from e
    except LocalEntryNotFoundError:
        try:
            snapshot = snapshot_download(**wanted)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
            raise ConfigError(
                f"{no_folder}, nothing in the local cache, and the Hub does not give it: {str(e).splitlines()[0]}; "
                f"{_DEMO}"
            ) from e
    folder = Path(snapshot)
    return Model(name, folder, folder.name)
