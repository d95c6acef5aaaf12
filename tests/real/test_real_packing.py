"""Packs on real vLLM: the grammar holds, what is in doubt is sent again, each row is its own document's."""

import json
import re
from pathlib import Path

from helpers_real import ON_SHARED, real_engine
from helpers_run import rows, start, write_job, write_jsonl

from batchgen.reporting.stats import read_telemetry

TOP = Path(__file__).parents[2]
pytestmark = ON_SHARED
DOCUMENTS = 12


def paragraphs(limit):
    """Pieces of the repository's own texts, none of which says what another says."""
    found = []
    for name in ("articles", "office"):
        for line in (TOP / f"data/{name}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
            text = json.loads(line)["text"]
            if isinstance(text, str):
                found += [part for part in re.split(r"\n\s*\n", text) if 120 <= len(part) <= 500]
    return found[:limit]


def words(text):
    return set(re.findall(r"\w+", text.lower()))


def nearest(summary, texts):
    """The document that has most words of the summary, each counted by how few documents have it."""
    sets = [words(text) for text in texts]
    said = {word: sum(word in one for one in sets) for word in words(summary)}
    scores = [sum(1 / said[word] for word in words(summary) & one) for one in sets]
    return scores.index(max(scores))


def test_each_row_is_that_of_its_document_whatever_the_model_makes_of_packs(tmp_path, out, model_folder, lent):
    texts = paragraphs(DOCUMENTS)
    assert len(texts) == DOCUMENTS
    write_jsonl(tmp_path / "a.jsonl", [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)])
    job = write_job(
        tmp_path,
        [{"path": str(tmp_path / "a.jsonl"), "id_field": "id"}],
        prompt={"system": "You write summaries.", "user": "{{ text }}\n\nSummarize the text above in one sentence."},
        engine=real_engine(model_folder),
        sampling={"max_tokens": 32},
        packing={"mode": "on", "max_documents": 3},
    )
    assert start(job).exit_status == 0
    report = json.loads((out / "report.json").read_text())
    found = rows(out)
    assert sorted(row["id"] for row in found) == sorted(f"d{n}" for n in range(DOCUMENTS))
    assert report["attempt"]["packs"] == DOCUMENTS // 3
    assert report["packing"]["documents"] + sum(report["packing"]["fallbacks"].values()) == DOCUMENTS
    assert "request_failed" not in report["packing"]["fallbacks"]  # vLLM takes the schema
    for column, told in (("prompt_tokens", "prompt"), ("completion_tokens", "output")):
        assert sum(row[column] for row in found) == report["attempt"]["tokens"][told]
    for row in found:
        if row["pack_size"] > 1:
            assert nearest(row["summary"], texts) == int(row["id"][1:])
    assert report["engine"]["args"]["structured_outputs_config"]["disable_any_whitespace"]
    # Constrained: an answer is a list from its first character on, with nothing between its items.
    events = [one for path in out.glob("telemetry-*") for one in read_telemetry(path) if one["event"] == "pack_refused"]
    assert all(re.match(r'\[\{"label": ?"[a-f][0-9a-f]{3}", ?"summary": ?"', one["text"]) for one in events)
