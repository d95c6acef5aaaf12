"""The LoRA adapter a job names, as files: a folder as PEFT saves it, or such a repository on the Hub."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import ConfigError
from batchgen.models import hub

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # vLLM takes the first that is there
_READS_HIDDEN = tuple(f".{name}_proj.lora_A.weight" for name in ("q", "k", "v", "gate", "up"))
_WANTED = hub.Wanted("engine.adapter", (_CONFIG, "adapter_model.*"), need=(_CONFIG, "adapter_model.*"))


@dataclass(frozen=True, slots=True)
class Adapter:
    """name: what the job says. revision: the Hub's commit, or None. rank: the largest of its matrices.

    base: the model it was made for, as its maker called it.
    """

    name: str
    folder: Path
    revision: str | None
    rank: int
    base: str | None

    @property
    def label(self) -> str:
        return f"{self.name} ({self.revision})" if self.revision else self.name

    def identity(self) -> dict[str, str]:
        """SHA-256 of both files, by name; the commit in place of the weights where there is one."""
        found: dict[str, str] = {"revision": self.revision} if self.revision else {}
        for name in (_CONFIG,) if self.revision else (_CONFIG, _weights(self.folder)):
            with (self.folder / name).open("rb") as stream:
                found[name] = hashlib.file_digest(stream, "sha256").hexdigest()
        return found

    def check_size(self, hidden_size: int | None) -> None:
        """Raise ConfigError where its matrices are for a model of another width, or its file is damaged.

        vLLM fills up a matrix that is too small, and says nothing. Only safetensors files are looked into.
        """
        file = self.folder / _weights(self.folder)
        if file.suffix != ".safetensors":
            return
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="np") as weights:
                names = [name for name in weights.keys() if name.endswith(_READS_HIDDEN)]  # noqa: SIM118  it is no dict
                found = {weights.get_slice(name).get_shape()[1] for name in names}
        except (SafetensorError, IndexError) as e:
            raise ConfigError(f"engine.adapter: {file}: is no safetensors file of an adapter: {e}") from e
        if hidden_size is not None and (others := found - {hidden_size}):
            raise ConfigError(
                f"engine.adapter: {self.name}: it was made for another model: its hidden_size is {min(others)}, that "
                f"of engine.args.model {hidden_size}"
            )

    def fits(self, model: str) -> bool:
        """Whether it says that it was made for `model`; folders and names on the Hub match by their last part."""
        return not self.base or Path(self.base).name.casefold() == Path(model).name.casefold()


def resolve(name: str) -> Adapter:
    """The adapter `engine.adapter` names. Raises ConfigError where its files are not there, or make no sense."""
    folder, revision = hub.locate(name, None, _WANTED)
    file = folder / _CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        rank, base = _rank(config), config.get("base_model_name_or_path")
    except OSError as e:
        raise ConfigError(f"engine.adapter: {folder}: is no LoRA adapter: it holds no {_CONFIG} ({e.strerror})") from e
    except (ValueError, LookupError, AttributeError, TypeError) as e:
        raise ConfigError(f"engine.adapter: {file}: is no LoRA configuration with a rank `r`") from e
    _weights(folder)
    return Adapter(name, folder, revision, rank, base if isinstance(base, str) else None)


def _rank(config: Any) -> int:
    ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise ValueError(ranks)
    return max(ranks)


def _weights(folder: Path) -> str:
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return name
    raise ConfigError(f"engine.adapter: {folder}: is no LoRA adapter: it holds no {_WEIGHTS[0]}")
