"""ROUGE of runs against a kept field and against each other: does the batched path or FP8 lose anything?

    pip install rouge-score
    python benchmarks/rouge.py --field abstract one-by-one=outputs/a rolling=outputs/b fp8=outputs/c

Rows are matched by id; only documents that have the field and are ok in all runs count, and with --pieces only those
that a run did in pieces. Prints F-measures in percent: each run against
the field, and each pair of runs against each other; the last line is JSON.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

import pyarrow.dataset as ds
from rouge_score.rouge_scorer import RougeScorer

KINDS = ("rouge1", "rouge2", "rougeL")


def summaries(folder: Path, field: str) -> dict[str, tuple[str, str, int]]:
    """id → (summary, reference, pieces) of the ok rows that have a reference."""
    rows = ds.dataset(sorted((folder / "summaries").glob("part-*.parquet"))).to_table(
        columns=["id", "status", "summary", field, "pieces"]
    )
    return {
        row["id"]: (row["summary"], row[field], row["pieces"])
        for row in rows.to_pylist()
        if row["status"] == "ok" and row[field]
    }


def means(scorer: RougeScorer, pairs: list[tuple[str, str]]) -> dict[str, float]:
    scores = [scorer.score(reference, text) for reference, text in pairs]
    return {kind: round(100 * statistics.mean(score[kind].fmeasure for score in scores), 2) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    parser.add_argument("--field", required=True, help="a kept field that holds the reference")
    parser.add_argument("--pieces", action="store_true", help="only documents that a run did in pieces")
    args = parser.parse_args()
    runs = {name: summaries(Path(folder), args.field) for name, _, folder in (one.partition("=") for one in args.runs)}
    ids = sorted(set.intersection(*(set(rows) for rows in runs.values())))
    if args.pieces:
        ids = [n for n in ids if any(rows[n][2] > 1 for rows in runs.values())]
    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    found = {
        f"{name} / {args.field}": means(scorer, [(rows[n][1], rows[n][0]) for n in ids]) for name, rows in runs.items()
    }
    for one, other in itertools.combinations(runs, 2):
        pairs = [(runs[one][n][0], runs[other][n][0]) for n in ids]
        found[f"{other} / {one}"] = means(scorer, pairs) | {"equal": sum(a == b for a, b in pairs)}
    for name, scores in found.items():
        print(f"{name:<32}" + "  ".join(f"{kind} {value}" for kind, value in scores.items()))
    print(json.dumps({"documents": len(ids), "ok": {name: len(rows) for name, rows in runs.items()}, "scores": found}))


if __name__ == "__main__":
    main()
