"""Which planted facts do the summaries of a run keep?  python benchmarks/facts.py outputs/summarize

data/facts.jsonl lists for each sample document the facts a summary should keep, each with its spellings. Prints a
line a document and the total; ends with 1 where a summary is a word-for-word beginning of its document.
"""

import json
import sys
from pathlib import Path

import jsonlines
import pyarrow.dataset as ds

from batchgen.data import COPIED

FACTS = Path(__file__).parent.parent / "data" / "facts.jsonl"


def plain(text: str) -> str:
    """For comparing: case and kind of white space do not matter."""
    return " ".join(text.casefold().split())


def main(run_dir: str) -> int:
    rows = ds.dataset(Path(run_dir) / "summaries").to_table().to_pylist()
    by_id = {(row["id_type"], row["id"]): row for row in rows}
    kept = planted = documents = 0
    with jsonlines.open(str(FACTS)) as lines:
        for line in lines:
            row = by_id.get((type(line["id"]).__name__, str(line["id"])))
            summary = plain((row or {}).get("summary") or "")
            found = [any(plain(spelling) in summary for spelling in fact) for fact in line["facts"]]
            kept, planted, documents = kept + sum(found), planted + len(found), documents + 1
            missing = [fact[0] for fact, one in zip(line["facts"], found, strict=True) if not one]
            note = f"  missing: {json.dumps(missing, ensure_ascii=False)}" if missing else ""
            print(f"{line['id']!s:14} {sum(found)}/{len(found)}{note}")
    ok = sum(row["status"] == "ok" for row in rows)
    copied = [row["id"] for row in rows if COPIED in row["flags"]]
    print(f"{kept} of {planted} planted facts kept in {documents} documents; {len(rows)} rows, {ok} ok, "
          f"{len(copied)} copied {copied or ''}")  # fmt: skip
    return 1 if copied else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
