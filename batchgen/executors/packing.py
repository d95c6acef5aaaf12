"""Which workflow an attempt has: by `packing.mode`, and for `auto` by what run.json says was decided before."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.executors.checking import Checked
from batchgen.fingerprint import digest
from batchgen.reporting.stats import Stats, Telemetry
from batchgen.storage.rundir import RunDirectory
from batchgen.workflows.auto import WARM_UP, AutoWorkflow, Turn
from batchgen.workflows.base import Workflow
from batchgen.workflows.packed import Opened, PackedWorkflow, PackRules
from batchgen.workflows.single import Rules

_MOST = 2048  # documents of a turn for one engine
_TOLD = 100  # refused answers that telemetry keeps of an attempt
log = logging.getLogger("batchgen")


@dataclass
class Packing:
    """frame: see PackRules. left: documents that there are at most, None where nobody knows."""

    checked: Checked
    directory: RunDirectory
    stats: Stats
    telemetry: Telemetry
    frame: Callable[[str], Sequence[int]]
    left: Callable[[], int | None]
    _told: int = 0

    def workflow(self, alone: Workflow, *, prefix: str, rules: Rules) -> Workflow:
        """alone: what does the documents that are not packed."""
        given = self.checked.job.packing
        decision = self._decision() if given.mode == "auto" else None
        if given.mode == "off" or (decision and decision["mode"] == "off"):
            return alone
        packs = PackRules(
            frame=self.frame,
            secret=bytes.fromhex((self.directory.read_run() or {})["packing_secret"]),
            max_documents=given.max_documents,
            max_pack_tokens=given.max_pack_tokens,
            form=given.answer,
            words=given.verify == "words",
        )
        packed = PackedWorkflow(alone, prefix=prefix, rules=rules, packs=packs, opened=self._opened)
        if given.mode == "on" or decision:
            return packed
        log.info(
            "packing: auto: measuring both ways on the first documents; with the prefix cache %s, %s is expected to be "
            "faster",
            *self._expected(),
        )
        return AutoWorkflow(packed, size=self._size, decided=self._decide)

    def _decision(self) -> dict[str, Any] | None:
        """What an earlier attempt decided for these settings."""
        run = self.directory.read_run() or {}
        found = run.get("decisions", {}).get("packing")
        if not isinstance(found, dict) or found.get("fingerprint") != digest(self.checked.fingerprint):
            return None
        log.info("packing: as decided before: %s", found["why"])
        return found

    def _opened(self, answer: Opened) -> None:
        self.stats.counts.packs += 1
        self.stats.counts.pack_extras += answer.extras
        if (answer.refused or answer.extras) and self._told < _TOLD:
            self._told += 1
            refused = dict(answer.refused)
            self.telemetry.event(
                "pack_refused", documents=answer.documents, extras=answer.extras, refused=refused, text=answer.text
            )

    def _size(self) -> int:
        """Documents of a turn: each way gets as many as keep the engine full with packs."""
        engine = (self.directory.read_run() or {})["engine"]
        size = min(_MOST, self.checked.job.packing.max_documents * engine["max_num_seqs"]) * engine["replicas"]
        left, least = self.left(), WARM_UP + 3 * size
        if left is not None and left < least:
            log.info(
                "packing: auto: %s documents are too few to measure both ways, which takes %s: one document a prompt",
                f"{left:,}", f"{least:,}",
            )  # fmt: skip
            return 0
        return int(size)

    def _decide(self, single: Turn, packed: Turn) -> bool:
        mode = "on" if packed.rate > single.rate else "off"
        refused = sum(packed.fallbacks.values())
        why = (
            f"{single.rate:,.1f} summaries/s one a prompt, {packed.rate:,.1f} in packs of up to "
            f"{self.checked.job.packing.max_documents} ({refused:,} of {packed.wanted:,} documents sent again), "
            f"prefix cache {self._expected()[0]}"
        )
        with self.directory.alone():  # of several shards that measure, the first decides for all
            if decision := self._decision():
                return str(decision["mode"]) == "on"
            value = self.directory.read_run() or {}
            value.setdefault("decisions", {})["packing"] = {
                "mode": mode,
                "why": why,
                "single_docs_per_s": round(single.rate, 3),
                "packed_docs_per_s": round(packed.rate, 3),
                "documents": packed.wanted,
                "fallbacks": dict(sorted(packed.fallbacks.items())),
                "fingerprint": digest(self.checked.fingerprint),
            }
            self.directory.write_run(value)
        log.info("packing: auto: %s: packing is %s from here on", why, mode)
        return mode == "on"

    def _expected(self) -> tuple[str, str]:
        """(what the job says of the prefix cache, the way that should then be faster)."""
        given = self.checked.job.engine.args.get("enable_prefix_caching")
        if given is False:
            return "off", "packing"
        return "on" if given else "as vLLM has it", "one document a prompt"
