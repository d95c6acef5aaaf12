"""Documents longer than the context, summarized whole: nothing of them is left out, nothing too long is sent."""

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers_config import document, real_tokenizer
from helpers_config import job as job_of
from helpers_run import by_id, record, rows, start, watch_requests, write_job, write_jsonl

from batchgen.errors import FingerprintError
from batchgen.models.tokenizer import BytesTokenizer
from batchgen.prompting.prompts import PromptBuilder

# A corpus that is not a part of this repository; beside it, or beside the folder of a worktree.
PEPS = [folder / "shared/data/peps.parquet" for folder in Path(__file__).parents[3:5]]
CONTEXT, ANSWER = 2048, 64
POLICIES = ["map_reduce", "refine"]
CANARY = "canary-[0-9a-f]+"
PARAGRAPH = (
    "The harbour board met on day {n} and agreed to repair {n} metres of quay wall. It will cost {n} crowns.\n\n"
)


def own_texts():
    """Long documents of several shapes, and short ones among them."""
    yield "".join(PARAGRAPH.format(n=n) for n in range(1000))
    yield "".join(f"Part {n}\n======\n\n" + PARAGRAPH.format(n=n) * 9 for n in range(30))
    yield " ".join(f"word{n}" for n in range(4000))
    yield "".join(f"\u4e16\u754c{n}\u3002" for n in range(3000))
    yield "A beginning." + " " * 20_000 + "An end."
    yield from (PARAGRAPH.format(n=n) * (n + 1) for n in range(60))


def shared_texts():
    path = next((path for path in PEPS if path.exists()), None)
    if path is None:
        pytest.skip(f"{PEPS[0]} is not there: only documents made here were tried")
    return pq.read_table(path, columns=["text"]).column("text").to_pylist()


TEXTS = {"own": own_texts, "peps": shared_texts}


def canaries(n):
    return [f"canary-{n:03x}{place}" for place in "abc"]


def with_canaries(n, text):
    """The text with a canary at its start, at a break near its middle, and at its end."""
    middle = max(text.find("\n\n", len(text) // 2), text.find(" ", len(text) // 2), 0)
    begin, inside, end = (f"\n\nHere is {one}.\n\n" for one in canaries(n))
    return begin + text[:middle] + inside + text[middle:] + end


def canary_job(folder, texts, *, policy, **long):
    docs = [record(n, text=with_canaries(n, text)) for n, text in enumerate(texts)]
    return write_job(
        folder,
        [write_jsonl(folder / "in/a.jsonl", docs)],
        engine={
            "backend": "fake",
            "args": {"max_model_len": CONTEXT, "max_num_seqs": 32},
            "fake": {"copies": CANARY},
        },
        sampling={"max_tokens": ANSWER},
        long_documents={"policy": policy} | long,
    )


@pytest.mark.parametrize("corpus", TEXTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_start_middle_and_end_of_each_document_come_back(tmp_path, out, monkeypatch, policy, corpus):
    texts = list(TEXTS[corpus]())
    sent = watch_requests(monkeypatch)
    outcome = start(canary_job(tmp_path, texts, policy=policy))
    assert outcome.exit_status == 0
    found = by_id(out)
    assert len(found) == len(texts)
    for n in range(len(texts)):
        row = found["str", f"d{n}"]
        assert re.findall(CANARY, row["summary"]) == canaries(n)  # in their order, and those of no other
        assert 1 <= row["requests"] <= 256
    assert max(len(one.prompt_ids) + one.max_tokens for one in sent) <= CONTEXT
    assert len(sent) == sum(row["requests"] for row in rows(out))
    assert sum(len(one.prompt_ids) for one in sent) == sum(row["prompt_tokens"] for row in rows(out))
    # Each canary stands in the piece it is in, and in the next where that repeats it.
    shown = BytesTokenizer().decode_batch([one.prompt_ids for one in sent])
    begin = {"map_reduce": "Write a summary of the following part", "refine": "This is a summary of the beg"}[policy]
    pieces = [text for text in shown if begin in text]
    met = Counter(one for text in pieces for one in re.findall(CANARY, text.partition("goes on:")[2] or text))
    assert max(met.values(), default=0) <= 2
    in_pieces = [n for n in range(len(texts)) if found["str", f"d{n}"]["pieces"]]
    assert in_pieces
    if policy == "map_reduce":
        assert set(met) == {one for n in in_pieces for one in canaries(n)}


@pytest.mark.parametrize("corpus", TEXTS)
@pytest.mark.parametrize("model", ["bytes", "real"])
def test_the_pieces_are_the_document_again(corpus, model):
    """What the prompts hold of a document, put together without what is repeated, is the whole of it."""
    tokenizer = BytesTokenizer() if model == "bytes" else real_tokenizer()
    long = {"policy": "map_reduce", "piece": "Part: {{ text }}", "overlap_tokens": 20}
    limit = CONTEXT - ANSWER
    prompts = PromptBuilder(
        job_of(long_documents=long, prompt={"system": "Be short.", "user": "{{ text }}"}),
        tokenizer,
        max_prompt_tokens=limit,
    )
    texts = list(TEXTS[corpus]()) if model == "bytes" else [text for text in TEXTS[corpus]() if len(text) > 20_000][:20]
    parted = 0
    for text in texts:
        prepared = prompts.prepare([(document(text), 0)])[0]
        assert prepared.error is None
        if not prepared.pieces:
            continue
        parted += 1
        assert max(map(len, prepared.pieces)) <= limit
        assert len({tuple(one[:5]) for one in prepared.pieces}) == 1  # what the prefix cache keeps
        at = 0
        for shown in tokenizer.decode_batch(prepared.pieces):
            piece = shown.partition("Part: ")[2].removesuffix("\nassistant\n")
            begin = max(
                (at - back for back in range(min(at, 100) + 1) if text.startswith(piece, at - back)), default=-1
            )
            if begin < 0:  # pieces that show nothing are not sent
                begin = text.find(piece, at)
                assert not text[at:begin].strip()
            assert begin >= 0
            at = begin + len(piece)
        assert not text[at:].strip()
    assert parted


@pytest.mark.parametrize("policy", POLICIES)
def test_a_document_that_fits_takes_the_way_it_always_took(tmp_path, policy):
    def of(policy):
        folder = tmp_path / policy
        docs = write_jsonl(folder / "in/a.jsonl", [record(n) for n in range(20)])
        start(write_job(folder, [docs], long_documents={"policy": policy}))
        return [
            {name: value for name, value in row.items() if name not in ("fingerprint", "finished_at", "source")}
            for row in rows(folder / "out")
        ]

    assert of(policy) == of("truncate")


@pytest.mark.parametrize("policy", POLICIES)
def test_more_requests_than_allowed_is_told_before_any_is_sent(tmp_path, out, policy):
    outcome = start(canary_job(tmp_path, ["word " * 5000, "word " * 100], policy=policy, max_requests=9))
    assert outcome.exit_status == 3
    row = by_id(out)["str", "d0"]
    assert (row["status"], row["error_type"], row["requests"]) == ("failed", "document_too_long", 0)
    assert "long_documents.max_requests is 9" in row["error"]
    assert by_id(out)["str", "d1"]["status"] == "ok"


def test_rounds_are_as_many_as_are_needed_and_no_more_than_allowed(tmp_path, out):
    texts = ["".join(PARAGRAPH.format(n=n) for n in range(300))]
    engine = {"backend": "fake", "args": {"max_model_len": 400, "max_num_seqs": 8}}
    reduce = {"piece": "Sum: {{ text }}", "reduce": "Join: {{ text }}", "overlap_tokens": 0}

    def job(folder, **more):
        docs = write_jsonl(folder / "in/a.jsonl", [record(n, text=text) for n, text in enumerate(texts)])
        long = {"policy": "map_reduce"} | reduce | more
        return write_job(folder, [docs], engine=engine, sampling={"max_tokens": 40}, long_documents=long)

    start(job(tmp_path, max_depth=3))
    (row,) = rows(out)
    assert (row["status"], row["depth"], row["flags"]) == ("ok", 3, ["map_reduced"])
    assert row["requests"] > row["pieces"] + 3
    start(job(tmp_path / "few", max_depth=1))
    (row,) = rows(tmp_path / "few/out")
    assert (row["status"], row["error_type"], row["depth"]) == ("failed", "not_reduced", 1)
    assert re.search(r"\d+ summaries are left after 1 rounds \(long_documents.max_depth\)", row["error"])


def test_a_piece_that_has_no_summary_fails_its_document_and_no_other(tmp_path, out, monkeypatch):
    sent = watch_requests(monkeypatch)
    texts = ["word " * 500 + "quicksand " + "word " * 2000, "word " * 2500, "word " * 50]
    job = canary_job(tmp_path, texts, policy="map_reduce")
    start(job, "engine.fake.fail_on=quicksand", "long_documents.overlap_tokens=0")
    found = by_id(out)
    row = found["str", "d0"]
    assert (row["status"], row["error_type"], row["summary"]) == ("failed", "request_failed", None)
    assert re.match(r"piece 2 of \d: ", row["error"])
    asked = [one for one in BytesTokenizer().decode_batch([one.prompt_ids for one in sent]) if "quicksand" in one]
    assert len(asked) == 2  # once more, and no third time
    assert (found["str", "d1"]["status"], found["str", "d2"]["status"]) == ("ok", "ok")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_dies_of_a_piece_dies_of_its_document(tmp_path, out, policy):
    texts = ["word " * 900 + "poison " + "word " * 900, "word " * 2500, "word " * 50]
    job = canary_job(tmp_path, texts, policy=policy)
    outcome = start(job, "engine.fake.die_on=poison", "long_documents.overlap_tokens=0")
    found = by_id(out)
    assert (found["str", "d0"]["status"], found["str", "d0"]["error_type"]) == ("failed", "engine_died")
    assert re.match(r"piece \d of \d+: tried alone", found["str", "d0"]["error"])
    assert (found["str", "d1"]["status"], found["str", "d2"]["status"]) == ("ok", "ok")
    assert outcome.report["documents"]["pending"] == 0
    assert not list(out.glob("strikes-*"))


@pytest.mark.parametrize("policy", POLICIES)
def test_engines_that_die_cost_no_piece(tmp_path, out, policy):
    start(
        canary_job(tmp_path, ["word " * 3000] * 5, policy=policy),
        "engine.fake.die_after=30",
        "engine.args.max_num_seqs=8",
    )
    found = by_id(out)
    assert [re.findall(CANARY, found["str", f"d{n}"]["summary"]) for n in range(5)] == [canaries(n) for n in range(5)]


def test_one_huge_document_waits_for_no_other_and_none_waits_for_it(tmp_path, out, monkeypatch):
    """Its requests in flight are a quarter of what runs; the others go on beside it."""
    sent = watch_requests(monkeypatch)
    job = canary_job(tmp_path, ["word " * 60_000, *["word " * 20] * 300], policy="map_reduce")
    start(job)
    finished = {name: row["finished_at"] for (_, name), row in by_id(out).items()}
    assert max(finished, key=finished.get) == "d0"
    in_pieces = ["following part" in one for one in BytesTokenizer().decode_batch([o.prompt_ids for o in sent])]
    assert 32 // 4 <= sum(in_pieces[:64]) <= 32 // 4 * 3


def test_answers_are_joined_in_order(tmp_path, out):
    text = "".join(f"canary-{n:x} " + "word " * 300 for n in range(12))
    start(canary_job(tmp_path, [text], policy="map_reduce"), "sampling.max_tokens=300")
    (row,) = rows(out)
    found = [one for one in re.findall(CANARY, row["summary"]) if one not in canaries(0)]
    assert found == [f"canary-{n:x}" for n in range(12)]


def test_prompts_of_pieces_are_the_jobs_and_part_of_the_run(tmp_path, out, monkeypatch):
    sent = watch_requests(monkeypatch)
    own = {
        "piece": "PIECE {{ text }}",
        "reduce": "REDUCE {{ boundary }} {{ text }}",
        "refine": "{{ summary }}{{ text }}",
    }
    job = canary_job(tmp_path, ["word " * 3000], policy="map_reduce", **own)
    start(job)
    shown = BytesTokenizer().decode_batch([one.prompt_ids for one in sent])
    assert {text.removeprefix("You write summaries.").split()[0] for text in shown} == {"PIECE", "REDUCE"}
    for key in ("piece", "reduce"):
        with pytest.raises(FingerprintError, match=rf"long_documents\.{key}: "):
            start(job, f"long_documents.{key}=Other {{{{ text }}}}")
    start(job, "long_documents.refine='{{ text }} {{ summary }}'", "long_documents.keep=middle_out")  # not in force


def test_the_report_tells_the_ways_and_what_they_cost(tmp_path, out):
    start(canary_job(tmp_path, ["word " * 3000, "word " * 10, "word " * 20], policy="refine"))
    ways = json.loads((out / "report.json").read_text())["documents"]["ways"]
    found = by_id(out)
    long, short = found["str", "d0"], [found["str", "d1"], found["str", "d2"]]
    names = ("requests", "prompt_tokens", "completion_tokens")
    assert ways["refine"] == {"documents": 1} | {name: long[name] for name in names}
    assert ways["whole"] == {"documents": 2} | {name: sum(row[name] for row in short) for name in names}
    assert ways["truncated"] == ways["map_reduce"] == dict.fromkeys(("documents", *names), 0)
    assert "| refine | 1 |" in (out / "report.md").read_text()
