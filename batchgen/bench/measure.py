"""`bench`: the same documents through batchgen and others, in turn; who goes first changes from round to round."""

import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchgen import __version__, fsio
from batchgen.bench import work as works
from batchgen.bench.figures import OURS, Turn, UnequalWorkError, refuse_unequal, told
from batchgen.bench.life import Life, shared_life
from batchgen.bench.outside import PEERS, NotRunError, Outside, is_peer
from batchgen.bench.work import Work
from batchgen.errors import ConfigError, Interrupted
from batchgen.job.jobfile import JobFile
from batchgen.lifecycle import Stop
from batchgen.text import nearest

_GENERATE, _LOOP = "generate", "loop-"
log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Wish:
    """What is measured. against: names besides batchgen. tokens: of each answer; None for the job's own lengths.

    peer_python: the interpreter for peers; None is this one.
    """

    against: tuple[str, ...]
    documents: int
    tokens: int | None
    rounds: int
    peer_python: Path | None = None


def bench(file: JobFile, wish: Wish, stop: Stop) -> dict[str, Any]:
    """All figures of all turns. Raises BatchgenError, UnequalWorkError where contestants did not do the same."""
    windows, peers = _sorted_out(wish.against)
    folder = _folder(file.job.output.path)
    try:
        with stop.raising():
            work = works.make(file, folder, documents=wish.documents, tokens=wish.tokens)
            _refuse_without_model(work, peers)
        with shared_life(work, folder, stop, by_hand=len(windows) > 1) as life:
            conditions = _conditions(file, wish, life)
            turns = _rounds(life, windows, wish.rounds)
            args = life.engine.info.args
        outside = Outside(work, args, folder, wish.peer_python, stop)
        more, not_run = _peer_rounds(outside, peers, turns, fixed=wish.tokens is not None)
    except Interrupted:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        log.info("what was written so far, logs of the engine too: %s", folder)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    if peers:
        conditions["versions_of_peers"] = {name: outside.versions[name] for name in peers if name not in not_run}
    return told([*turns, *more], conditions, not_run)


def _sorted_out(names: Sequence[str]) -> tuple[dict[str, int | None], list[str]]:
    """(contestants of the shared engine with their windows, peers). Raises ConfigError for an unknown name."""
    windows: dict[str, int | None] = {OURS: None}
    peers = []
    for name in dict.fromkeys(names):
        size = name.removeprefix(_LOOP)
        if name == _GENERATE:
            windows[name] = None
        elif size != name and size.isdecimal() and int(size):
            windows[name] = int(size)
        elif is_peer(name):
            peers.append(name)
        elif name != OURS:
            known = [_GENERATE, "loop-64", "loop-256", "loop-1024", "transformers-32", *PEERS]
            raise ConfigError(f"--against {name}: unknown{nearest(name, known)}; known are {', '.join(known)}")
    return windows, peers


def _refuse_without_model(work: Work, peers: Sequence[str]) -> None:
    if peers and work.checked.model is None:
        raise ConfigError(f"--against {peers[0]}: works with a model only: name one as engine.args.model")


def _folder(output: Path) -> Path:
    """A new folder beside the run directory: rows are as durable as the job's, on the same disk."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".bench-", dir=output.parent))
    except OSError as e:
        raise fsio.output_error(output, e) from e


def _rounds(life: Life, windows: Mapping[str, int | None], rounds: int) -> list[Turn]:
    turns: list[Turn] = []
    for n in range(1, rounds + 1):
        names = list(windows)[:: 1 if n % 2 else -1]
        now = []
        for name in names:
            now.append(life.turn(name, n, windows[name]))
            _tell(now[-1])
        refuse_unequal(now, fixed=life.work.tokens is not None)
        turns += sorted(now, key=lambda turn: list(windows).index(turn.contestant))
    return turns


def _peer_rounds(
    outside: Outside, peers: Sequence[str], ours: Sequence[Turn], *, fixed: bool
) -> tuple[list[Turn], dict[str, str]]:
    """(turns of the peers that came to the end of every round, the others with the reason)."""
    turns: dict[str, list[Turn]] = {name: [] for name in peers}
    not_run: dict[str, str] = {}
    for first in (turn for turn in ours if turn.contestant == OURS):
        for name in peers if first.round % 2 else reversed(peers):
            if name in not_run:
                continue
            try:
                turn = outside.turn(name, first.round)
                refuse_unequal([first, turn], fixed=fixed)
            except (NotRunError, UnequalWorkError) as e:
                not_run[name] = str(e)
                log.warning("%s is left out: %s", name, e)
                continue
            _tell(turn)
            turns[name].append(turn)
    return [turn for name in peers if name not in not_run for turn in turns[name]], not_run


def _tell(turn: Turn) -> None:
    log.info("round %s: %s: %.2f s, %.2f docs/s", turn.round, turn.contestant, turn.seconds, turn.docs_per_s)


def _conditions(file: JobFile, wish: Wish, life: Life) -> dict[str, Any]:
    work, info = life.work, life.engine.info
    lengths = [len(ids) for ids in work.prompts]
    by_hand = "windows over the fake engine" if info.backend == "fake" else "LLM.generate"
    return {
        "job": str(file.origin.file),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": info.device,
        "host": {
            "cores": len(os.sched_getaffinity(0)),
            "load": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
        },
        "backend": info.backend,
        "engine_args": json.loads(json.dumps(info.args, default=str)),
        "versions": {"batchgen": __version__, **info.versions},
        "documents": len(lengths),
        "different_documents": work.distinct,
        "prompt_tokens": {"sum": sum(lengths), "shortest": min(lengths), "longest": max(lengths)},
        "answer_tokens": {"each": wish.tokens} if wish.tokens else {"at_most": work.job.sampling.max_tokens},
        "in_flight": life.engine.limits.in_flight,
        "checkpoint": work.job.checkpoint.model_dump(),
        "rounds": wish.rounds,
        "generate_and_loops": f"{by_hand}, token ids made before",
    }


def write(path: Path, figures: Mapping[str, Any]) -> None:
    """The figures as a JSON file. Raises OutputError."""
    fsio.write_atomic(path, (json.dumps(figures, indent=2, ensure_ascii=False, default=str) + "\n").encode())
