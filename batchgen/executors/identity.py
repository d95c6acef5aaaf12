"""Whose run the folder holds: it goes on only under the settings of the parts that are there."""

import logging
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from batchgen import __version__, sinks
from batchgen.errors import FingerprintError, LockedError
from batchgen.executors.checking import Checked
from batchgen.fingerprint import differences, digest
from batchgen.storage.rundir import RunDirectory

OnChange = Literal["refuse", "keep", "new-run"]
log = logging.getLogger("batchgen")


def settle(checked: Checked, directory: RunDirectory, *, fresh: bool, on_change: OnChange) -> None:
    """Go on only with the settings of the parts that are there, unless told otherwise.

    Needs the run's lock: of several shards that begin a run one writes its settings, and the others find them.
    """
    if fresh:
        if directory.run_json.exists() or any(directory.summaries.glob("part-*")):
            log.info("--fresh: the old run is now %s", directory.set_aside())
        old = None
    else:
        old = directory.read_run()
    now = checked.fingerprint
    others = directory.others
    # Without a row, settings are nobody's yet: unless another shard is about to make some.
    made = sinks.format_of(directory.summaries) is not None or bool(others)
    if made and old is not None and (lines := differences(old["fingerprint"], now)):
        _refuse(checked, directory, old, lines, on_change=on_change)
        if on_change == "new-run":
            log.info("--on-change new-run: the old run is now %s", directory.set_aside())
            old = None
        else:
            log.info("--on-change keep: going on under new settings; rows tell theirs in column fingerprint")
    sinks.refuse_other(directory.summaries, checked.job.output.format)
    began = (old or {}).get("began") or datetime.now(UTC).isoformat(timespec="seconds")
    earlier = dict((old or {}).get("earlier_fingerprints", {}))
    if made and old is not None and digest(old["fingerprint"]) != digest(now):
        earlier[digest(old["fingerprint"])] = old["fingerprint"]
    value = (old or {}) | {
        "name": checked.job.name,
        "began": began,
        "batchgen": __version__,
        "fingerprint": now,
        "fingerprint_digest": digest(now),
        "earlier_fingerprints": earlier,
        "job": _job_record(checked),
        "shards": directory.shard.count,
    }
    if checked.job.packing.mode != "off":
        value.setdefault("packing_secret", secrets.token_hex(32))
    if value != old:
        directory.write_run(value)
    directory.forget_other_counts()


def _refuse(
    checked: Checked, directory: RunDirectory, old: Mapping[str, Any], lines: list[str], *, on_change: OnChange
) -> None:
    """Raise FingerprintError, or LockedError, where the run does not go on so. lines: how the settings differ."""
    if on_change == "refuse":
        raise FingerprintError(_refusal(directory.path, lines))
    if others := directory.others:
        raise LockedError(
            f"{directory.path}: {others[0].shard} of this run is at work under its old settings: "
            f"{others[0].who_holds()}; start this again when no shard runs"
        )
    if on_change == "keep" and old["fingerprint"]["columns"] != checked.fingerprint["columns"]:
        raise FingerprintError(
            f"{directory.path}: the kept fields are not those of the run there, and all its parts "
            "have the same columns: --on-change new-run, or the old list under input.keep"
        )


def _job_record(checked: Checked) -> dict[str, Any]:
    """The job with all defaults, and which chat template it used."""
    record = checked.written.model_dump()
    template = checked.chat_template
    record["prompt"]["chat_template_sha256"] = template and template.sha256
    return record


def _refusal(path: Path, lines: list[str]) -> str:
    shown = "\n".join(f"  {line}" for line in lines)
    return (
        f"{path}: the run there was made with other settings:\n{shown}\n"
        "Go on with one of: the old settings; --on-change keep (new rows under the new settings, old rows stay); "
        "--on-change new-run (the old run is moved aside, a new one begins)"
    )
