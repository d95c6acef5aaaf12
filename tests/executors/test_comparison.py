"""Two runs side by side: what differs, ratios, and texts matched by document."""

import json

import pytest
from helpers_pages import HOSTILE, Page
from helpers_run import command, record, rows, start, write_job, write_jsonl

from batchgen.errors import ConfigError
from batchgen.executors import comparison, pages


def records(numbers, **more):
    return [record(n, **more) for n in numbers]


@pytest.fixture
def two(tmp_path):
    """Two runs: documents 0 to 9 and 5 to 14; document 7 was edited, 8 fails in the second, which copies."""
    a = write_job(tmp_path / "a", [write_jsonl(tmp_path / "a/a.jsonl", records(range(10)))], checkpoint={"rows": 3})
    start(a)
    edited = [
        *records(range(5, 7)), record(7, text="Another text about another harbour."), *records(range(8, 15))
    ]  # fmt: skip
    b = write_job(
        tmp_path / "b", [write_jsonl(tmp_path / "b/b.jsonl", edited)], sampling={"max_tokens": 40, "temperature": 0.5},
        engine={"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 9}}, failures={"max": 5},
    )  # fmt: skip
    start(b, "engine.fake.fail_on=Minutes 8", "engine.fake.copies=on day ..?.?", "output.format=jsonl")
    return tmp_path / "a/out", tmp_path / "b/out"


def test_texts_are_matched_by_document(two):
    found, pairs = comparison.compare(*two)
    texts = found["texts"]
    numbers = {name: texts[name] for name in ("both", "only_a", "only_b", "edited", "both_ok", "same", "different")}
    assert numbers == {
        "both": 5, "only_a": 5, "only_b": 5, "edited": 1, "both_ok": 3, "same": 0, "different": 3
    }  # fmt: skip
    by_id = [{row["id"]: row["summary"] for row in rows(out)} for out in two]
    assert {one["id"] for one in texts["examples"]} == {"d5", "d6", "d9"}
    for one in texts["examples"]:
        assert (one["a"], one["b"]) == tuple(known[one["id"]] for known in by_id)
    assert [pair.b.row["id"] for pair in pairs] == [one["id"] for one in texts["examples"]]


def test_settings_that_differ_are_told_and_whether_they_make_texts(two):
    found, _ = comparison.compare(*two)
    told = {one["key"]: (one["a"], one["b"], one["makes_texts"]) for one in found["settings"]}
    assert told["sampling.temperature"] == (0.0, 0.5, True)
    assert told["engine.args.max_num_seqs"] == (4, 9, False)
    assert told["engine.fake.fail_on"] == (None, "Minutes 8", False)
    assert "name" not in told
    assert "output.dir" not in told
    assert "engine.args.max_model_len" not in told


def test_figures_have_ratios(two):
    found, _ = comparison.compare(*two)
    told = {one["figure"]: (one["a"], one["b"], one["ratio"]) for one in found["figures"]}
    assert told["documents.ok"] == (10, 9, 0.9)
    assert told["documents.failed"] == (0, 1, None)
    assert told["run.rates.docs_per_s"][2] > 0
    assert "run.gpu.power_w" not in told  # neither has one


def test_a_run_and_itself_are_the_same(two):
    found, _ = comparison.compare(two[0], two[0])
    assert found["settings"] == []
    assert {one["ratio"] for one in found["figures"]} <= {1.0, None}
    texts = found["texts"]
    assert (texts["both"], texts["same"], texts["different"], len(texts["examples"])) == (10, 10, 0, 8)


def test_of_an_edited_document_its_newest_row_counts(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", records(range(4)))])
    start(job)
    write_jsonl(tmp_path / "a.jsonl", records(range(4), text="All of them have another text by now, long enough."))
    # The engine dies before old rows are taken out.
    start(job, "engine.fake.die_after=2", "engine.fake.lives=1")
    found, _ = comparison.compare(tmp_path / "out", tmp_path / "out")
    assert found["texts"]["both"] == 4


def test_a_run_without_rows(two, tmp_path):
    start(write_job(tmp_path / "c", [write_jsonl(tmp_path / "c/c.jsonl", [])]))
    found, pairs = comparison.compare(two[0], tmp_path / "c/out")
    assert (found["texts"]["both"], found["texts"]["only_a"], pairs) == (0, 10, [])
    assert comparison.markdown(found)


def test_a_folder_that_is_no_run_is_refused(two, tmp_path):
    with pytest.raises(ConfigError, match="is no run directory"):
        comparison.compare(two[0], tmp_path)


def test_text_json_and_page_tell_the_same(two, tmp_path):
    told = command("report", *two, "--html", tmp_path / "page.html", "--json")
    found = json.loads(told.stdout)
    text = comparison.markdown(found)
    assert "| documents.ok | 10 | 9 | 0.900 |\n" in text
    assert "| sampling.temperature | 0 | 0.5 | yes |\n" in text
    assert "| of these, with different texts | 3 |\n" in text
    assert "None" not in text
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.tags.count("article") == 3
    assert "The harbour board met on day 5" in page.text
    assert "3 with different ones" in page.text


def test_texts_of_others_are_text(tmp_path):
    for name, copies in (("a", ".{50}"), ("b", ".{60}")):
        job = write_job(
            tmp_path / name, [write_jsonl(tmp_path / name / "i.jsonl", records(range(2), text=HOSTILE * 2))]
        )
        start(job, f"engine.fake.copies=(?s)<script{copies}")
    two = tmp_path / "a/out", tmp_path / "b/out"
    pages.write(*two, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "<script>alert(1)" in page.text
    assert not {"script", "img"} & set(page.tags)
    assert page.tags.count("style") == 1
    found, _ = comparison.compare(*two)
    assert "\x1b" not in comparison.markdown(found)
    assert found["texts"]["different"] == 2
