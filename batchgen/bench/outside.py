"""Contestants in a process of their own: `batchgen.bench.peers` says how each of them does the work."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import batchgen
from batchgen.bench.figures import Turn
from batchgen.bench.work import Work
from batchgen.errors import EngineError
from batchgen.lifecycle import Stop

# The module of each; `transformers-K` has the size of its batches in its name.
PEERS = {
    "vllm-generate": "vllm_generate",
    "vllm-throughput": "vllm_throughput",
    "ray-data": "ray_data",
    "datatrove": "datatrove",
}
_BATCHES = re.compile(r"transformers-([1-9]\d*)")
_LINES = 20


class NotRunError(EngineError):
    """A peer that did not do the work, and why."""


def is_peer(name: str) -> bool:
    return name in PEERS or _BATCHES.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Outside:
    """Runs peers over one work. engine_args: those that the shared engine had. python: the interpreter for them.

    versions: of the packages that a peer worked with, by its name.
    """

    work: Work
    engine_args: Mapping[str, Any]
    folder: Path
    python: Path | None
    stop: Stop
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def turn(self, name: str, round_: int) -> Turn:
        """One process life. Raises NotRunError where the peer is not installed, or did not come to its end."""
        folder = self.folder / f"{round_}-{name}"
        folder.mkdir()
        batch = _BATCHES.fullmatch(name)
        module = "transformers_batches" if batch else PEERS[name]
        (folder / "work.json").write_text(json.dumps(self._told(folder, batch and int(batch[1])), default=str))
        self._run(module, folder)
        try:
            found = json.loads((folder / "result.json").read_text())
            self.versions[name] = found["versions"]
            return Turn(
                contestant=name,
                round=round_,
                seconds=found["seconds"],
                documents=found["documents"],
                prompt_tokens=found["prompt_tokens"],
                output_tokens=found["output_tokens"],
                first_s=found["first_s"],
                peak_bytes=found["peak_bytes"],
                start_s=found["start_s"],
            )
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise NotRunError(f"its result cannot be read: {type(e).__name__}: {e}") from e

    def _told(self, folder: Path, batch: int | None) -> dict[str, Any]:
        """WORK.json of the peers' contract."""
        model, sampling = self.work.checked.model, self.work.job.sampling
        assert model is not None
        prompts = self.folder / "prompts.jsonl"
        if not prompts.exists():
            with prompts.open("w", encoding="utf-8") as stream:
                for n, ids in enumerate(self.work.prompts):
                    stream.write(json.dumps({"id": f"d{n}", "prompt_ids": list(ids)}) + "\n")
        return {
            "model": str(model.folder),
            "engine_args": {k: v for k, v in self.engine_args.items() if k not in ("model", "revision")},
            "prompts_file": str(prompts),
            "max_tokens": sampling.max_tokens,
            "ignore_eos": bool(sampling.others.get("ignore_eos", False)),
            "temperature": sampling.temperature,
            "out": str(folder / "rows.jsonl"),
            "batch": batch,
        }

    def _run(self, module: str, folder: Path) -> None:
        words = [str(self.python or sys.executable), "-m", f"batchgen.bench.peers.{module}"]
        environment = os.environ | {"PYTHONPATH": str(_only_batchgen(self.folder))}
        errors = folder / "stderr.log"
        with errors.open("wb") as err, (folder / "stdout.log").open("wb") as out, self.stop.raising():
            try:
                child = subprocess.Popen(
                    [*words, str(folder / "work.json"), str(folder / "result.json")],
                    stdout=out, stderr=err, env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as e:
                raise NotRunError(f"{words[0]}: {e.strerror}") from e
            try:
                while child.poll() is None:
                    time.sleep(0.05)
            finally:
                _end(child)
        if child.returncode != 0:
            raise NotRunError(_why(child.returncode, errors))


def _only_batchgen(folder: Path) -> Path:
    """A folder for PYTHONPATH that holds this package and nothing else: the peer's other packages are its own."""
    path = folder / "path"
    path.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (path / "batchgen").symlink_to(Path(batchgen.__file__).parent.resolve(), target_is_directory=True)
    return path


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a peer: its own children can outlive it."""
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(child.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 9)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def _why(status: int, errors: Path) -> str:
    """The peer's own last words."""
    with errors.open(encoding="utf-8", errors="replace") as stream:
        lines = deque((line.rstrip() for line in stream if line.strip()), maxlen=_LINES)
    last = lines[-1].strip() if lines else "without a word"
    if status == EngineError.exit_status:
        return last
    return f"it ended with status {status}: {last}"
