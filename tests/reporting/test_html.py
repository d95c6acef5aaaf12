"""report.html: its figures are the report's, it is harmless whatever the documents are, and nobody waits for it."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from helpers_pages import Page, empty, fast, one_document, page_of, resumed
from helpers_run import command, record, rows, start, stop_after_a_part, write_job, write_jsonl

from batchgen.errors import ConfigError, OutputError
from batchgen.executors import inspection, pages
from batchgen.reporting import figures, html, page, samples
from batchgen.shards import Shard
from batchgen.storage.rundir import RunDirectory


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run to look at."""
    with pytest.MonkeyPatch.context() as patch:
        fast(patch)
        return resumed(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(made, tmp_path):
    """The same, to be changed; its inputs are those of the first."""
    return Path(shutil.copytree(made, tmp_path / "out"))


def report_of(out: Path) -> dict:
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def look_at(run: Path, folder: Path) -> Page:
    """The page that `report --html` makes of a run."""
    assert pages.write(run, None, folder / "page.html") == (folder / "page.html").stat().st_size
    return Page((folder / "page.html").read_text(encoding="utf-8"))


def agree(out: Path) -> dict:
    """The figures of the page, which are those of report.json."""
    shown, report = page_of(out).figures, report_of(out)
    assert {name: page.reach(report, name) for name in shown} == shown
    return shown


def test_figures_are_those_of_the_report_and_of_the_rows(made):
    shown = agree(made)
    by_status = [row["status"] for row in rows(made)]
    for status in ("ok", "failed", "skipped"):
        assert shown[f"documents.{status}"] == by_status.count(status) > 0
    ok = [row for row in rows(made) if row["status"] == "ok"]
    assert shown["run.tokens.output"] - shown["run.tokens.wasted"] == sum(row["completion_tokens"] for row in ok)
    assert shown["run.rates.docs_per_s"] > 0


def test_costs_and_reasons_are_those_of_the_report(made):
    shown, report = agree(made), report_of(made)
    assert shown["cost.total"] == pytest.approx(0.1 * report["run"]["gpu"]["gpu_seconds"], rel=0.001)
    assert shown["cost.per_1000_documents"] == report["cost"]["per_1000_documents"] > 0
    assert report["why"]
    text = page_of(made).text
    assert [one for one in report["why"] if one["text"] not in text or one["setting"] not in text] == []


def test_a_resumed_run_shows_everything_there_is(made):
    page = page_of(made)
    assert page.tags.count("svg") == 11
    titles = ["Documents, docs/s", "Requests in the engine", "KV cache in use", "Preemptions", "TTFT", "TPOT"]
    assert [title for title in titles if title not in page.text] == []
    assert "started again" in page.text
    assert "The board met in hall" in page.text
    assert "limit 30 reached" in page.text
    assert "could not" not in page.text
    attributes = [value for name, value in page.attributes if name == "id"]
    assert len(attributes) == len(set(attributes))


def test_texts_of_others_are_text(made):
    text = (made / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "<script>alert(1)</script><img src=http://x.invalid/a onerror=alert(2)></style>" in page.text
    assert not {"script", "img", "b", "i", "iframe", "object", "link", "form"} - {"b"} & set(page.tags)
    assert page.tags.count("style") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert {value[0] for name, value in page.attributes if name in ("href", "xlink:href")} == {"#"}
    assert not [name for name, _ in page.attributes if name in ("src", "srcset", "action", "data")]
    assert "url(http" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
    assert "default-src 'none'" in text


def test_links_lead_to_examples(made):
    page = page_of(made)
    ids = {value for name, value in page.attributes if name == "id"}
    links = {value[1:] for name, value in page.attributes if name == "href"}
    assert links <= ids
    assert {f"reason-{n}" for n in range(1, 4)} <= links


@pytest.mark.parametrize(("make", "documents"), [(one_document, 1), (empty, 0)])
def test_a_run_with_next_to_nothing(tmp_path, make, documents):
    out = make(tmp_path)
    shown = agree(out)
    page = page_of(out)
    assert (shown["documents.ok"], shown["documents.total"], page.tags.count("svg")) == (documents, documents, 0)
    assert page.tags.count("article") == documents
    assert "None" not in re.sub(r"None\.", "", page.text)
    assert "nan" not in page.text


def test_a_start_with_nothing_to_do_leaves_the_page(tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError

    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(60)))], checkpoint={"rows": 7},
                    report={"cost": {"per_gpu_hour": 2.0}})  # fmt: skip
    for limit in (20, None):
        start(job, "engine.fake.tells={gpus: 1}", limit=limit)
    out = tmp_path / "out"
    before = (out / "report.html").stat().st_mtime_ns
    monkeypatch.setattr(html, "make", never)
    assert start(job).report["attempt"]["number"] == 3
    assert (out / "report.html").stat().st_mtime_ns == before
    assert agree(out)["cost.total"] > 0


def test_a_start_that_does_something_makes_it_anew(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(3)))])
    start(job)
    write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))
    start(job)
    assert agree(tmp_path / "out")["documents.ok"] == 5


def test_shards_have_pages_of_their_own_and_one_together(tmp_path):
    inputs = [
        write_jsonl(tmp_path / f"{name}.jsonl", map(record, range(9 * n, 9 * n + 5))) for n, name in enumerate("abcd")
    ]
    job = write_job(tmp_path, inputs, failures={"max": 9})
    for number in range(4):
        start(job, "engine.fake.fail_every=4", shard=Shard(number, 4))
    out, ok = tmp_path / "out", 0
    for number in range(4):
        page = Page((out / f"report-{Shard(number, 4).label}.html").read_text(encoding="utf-8"))
        ok += page.figures["documents.ok"]
        assert page.figures["documents.failed"] == 1
        assert page.text.count("the fake engine failed this request") == 1
    assert inspection.write_report(out)["documents"]["ok"] == ok == agree(out)["documents.ok"] == 16
    text = page_of(out).text
    assert text.count("the fake engine failed this request") == 3  # of four
    assert [shard for shard in ("0/4", "1/4", "2/4", "3/4") if shard not in text] == []
    assert "4 shards, added up" in text


def test_nobody_waits_for_it_after_a_signal(tmp_path, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(9)))], checkpoint={"rows": 3})
    monkeypatch.setattr(samples, "look_ups", lambda *_, **__: [lambda: time.sleep(9)])
    monkeypatch.setattr(html, "HURRY_S", 0.1)
    with monkeypatch.context() as patch:
        stop = stop_after_a_part(patch)
        begin = time.monotonic()
        assert start(job, "engine.fake.docs_per_s=30", stop=stop).exit_status == 75
    assert time.monotonic() - begin < 3
    page = page_of(tmp_path / "out")
    assert "There was no time for all plots and documents" in page.text
    assert "not looked up in time" in page.text
    agree(tmp_path / "out")
    monkeypatch.undo()
    start(job)
    assert "not looked up in time" not in page_of(tmp_path / "out").text


def test_a_page_without_its_whole_content_is_made_whole_by_the_next_start(tmp_path, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(2)))])
    with monkeypatch.context() as patch:
        patch.setattr(samples, "look_ups", lambda *_, **__: [lambda: time.sleep(5)])
        patch.setattr(html, "PATIENCE_S", 0.05)
        start(job)
    assert "There was no time" in page_of(tmp_path / "out").text
    start(job)
    assert "There was no time" not in page_of(tmp_path / "out").text


def test_what_cannot_be_drawn_is_left_out(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise ZeroDivisionError("of a plot")

    monkeypatch.setattr(figures, "wanted", lambda *_: [figures.Wanted("speed", "t", fails)])
    out = one_document(tmp_path)
    assert "report.html lacks something: ZeroDivisionError: of a plot" in caplog.text
    assert agree(out)["documents.ok"] == 1


def test_a_run_does_not_fail_for_a_page(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise ZeroDivisionError("of the page")

    monkeypatch.setattr(figures, "times", fails)
    out = one_document(tmp_path)
    assert "report.html could not be made" in caplog.text
    assert report_of(out)["exit_status"] == 0
    assert not (out / "report.html").exists()


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    out = tmp_path / "out"
    (out / "report.html").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"report\.html: cannot be written"):
        one_document(tmp_path)


def test_a_run_of_another_machine_is_shown_without_its_documents(run, tmp_path):
    for name in ("run.json", "plan.json"):
        told = (run / name).read_text(encoding="utf-8")
        (run / name).write_text(told.replace("/in/", "/not/here/"), encoding="utf-8")
    page = look_at(run, tmp_path)
    assert "its document is not found at its place" in page.text
    assert page.tags.count("svg") == 3  # it was too short for plots over time
    assert page.figures["documents.ok"] == agree(run)["documents.ok"]


def test_a_document_that_was_edited_is_not_shown_with_its_old_summary(tmp_path):
    out = one_document(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [record(1, text="The chair met nobody on that day.")])
    page = look_at(out, tmp_path)
    assert "chair met" not in page.text
    assert "not found at its place" in page.text


def test_a_file_that_is_no_page_is_not_replaced(run, tmp_path):
    (tmp_path / "thesis.html").write_text("<h1>Mine</h1>")
    with pytest.raises(ConfigError, match=r"thesis\.html: is there, and is no report of batchgen"):
        pages.write(run, None, tmp_path / "thesis.html")
    assert (tmp_path / "thesis.html").read_text() == "<h1>Mine</h1>"
    assert look_at(run, tmp_path).figures == look_at(run, tmp_path).figures


def test_secrets_are_no_part_of_the_page():
    shown = page.settings({"engine": {"args": {"hf_token": "hf_x", "max_tokens": 5}}, "api_key": None})
    assert "hf_x" not in shown
    assert "max_tokens: 5" in shown


def test_parts_of_a_run_that_is_looked_at_may_be_damaged(run, tmp_path):
    for part in RunDirectory(run).parts(".parquet"):
        part.write_bytes(b"PAR1 no more")
    assert look_at(run, tmp_path).figures["documents.ok"] == 0


def test_the_command_writes_the_page_alone(run, tmp_path):
    done = command("report", run, "--html", tmp_path / "page.html")
    assert (done.returncode, done.stdout) == (0, "")
    assert "bytes → " in done.stderr
    told = command("report", run, "--html", tmp_path / "page.html", "--json")
    shown = Page((tmp_path / "page.html").read_text(encoding="utf-8")).figures
    assert shown["documents.ok"] == json.loads(told.stdout)["documents"]["ok"] > 0
