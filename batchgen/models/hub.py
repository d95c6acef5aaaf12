"""Files a job names as a folder or as a name on the Hugging Face Hub, and why they cannot be had.

A name is looked for in the local cache first, so that a run goes on without a network, and means the same files at
every start.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Wanted:
    """key: the job's key. files: patterns of the files to get. need: patterns that each must match a file."""

    key: str
    files: tuple[str, ...]
    need: tuple[str, ...]


def offline() -> bool:
    """Whether the environment forbids to ask the Hub: HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def download(name: str, revision: str | None) -> str:
    """The command that fills the cache."""
    return f"hf download {name}" + (f" --revision {revision}" if revision else "")


def locate(name: str, revision: str | None, wanted: Wanted) -> tuple[Path, str | None]:
    """The folder, and the commit where it came from the Hub. Raises ConfigError where there is none."""
    folder = Path(os.path.expanduser(name))  # noqa: PTH111  Path's own raises for a user that is not there
    if folder.is_dir():
        return folder, None
    no_folder = f"{wanted.key}: {name}: no such folder (working directory {Path.cwd()})"
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(no_folder)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    # Only the top of the repository: what lies below (`original/`) is for other programs.
    asked: dict[str, Any] = {
        "repo_id": name,
        "revision": revision,
        "allow_patterns": list(wanted.files),
        "ignore_patterns": ["*/*"],
    }
    cached: Path | None = None
    try:
        cached = Path(snapshot_download(**asked, local_files_only=True))
    except HFValidationError as e:
        raise ConfigError(f"{no_folder}, and no name the Hub could have") from e
    except LocalEntryNotFoundError as e:
        part = getattr(e, "snapshot_path", None)  # newer clients know what a snapshot has to hold
        cached = None if part is None else Path(part)
    else:
        if not _missing(cached, wanted):
            return cached, cached.name
    return _from_hub(lambda: Path(snapshot_download(**asked)), name, revision, _About(wanted, no_folder, cached))


@dataclass(frozen=True, slots=True)
class _About:
    """What errors tell. cached: the part of it that is in the local cache."""

    wanted: Wanted
    no_folder: str
    cached: Path | None


def _from_hub(get: Callable[[], Path], name: str, revision: str | None, about: _About) -> tuple[Path, str]:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    at = f"{about.wanted.key}: {name}"
    here = about.no_folder + (
        f", only a part of it in the local cache ({about.cached})"
        if about.cached
        else f", nothing in the local cache ({constants.HF_HUB_CACHE})"
    )
    if offline():
        raise ConfigError(
            f"{here}, and HF_HUB_OFFLINE forbids to ask the Hub. Where there is a network, run: "
            f"{download(name, revision)}"
        )
    try:
        snapshot = get()
    except GatedRepoError as e:
        raise ConfigError(
            f"{at}: this repository is gated: accept its terms on {constants.ENDPOINT}/{name}, then put a token of "
            "that account into HF_TOKEN in the environment"
        ) from e
    except RevisionNotFoundError as e:
        raise ConfigError(f"{at}: the Hub has no revision {revision!r} of it") from e
    except RepositoryNotFoundError as e:
        raise ConfigError(
            f"{about.no_folder}, and the Hub has no such repository, or it is private: then put a token into HF_TOKEN "
            "in the environment"
        ) from e
    except Exception as e:  # the client has errors of its own for each kind of network trouble
        raise ConfigError(
            f"{here}, and the Hub does not give it: {(str(e).splitlines() or [type(e).__name__])[0]}"
        ) from e
    if missing := _missing(snapshot, about.wanted):
        raise ConfigError(f"{at}: the repository has no {missing[0]}")
    return snapshot, snapshot.name


def _missing(folder: Path, wanted: Wanted) -> list[str]:
    # `exists`: a cache can hold links whose files are gone.
    return [pattern for pattern in wanted.need if not any(file.exists() for file in folder.glob(pattern))]
