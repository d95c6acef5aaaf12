"""The longest prompt of all documents, and how little is encoded to find it."""

import dataclasses
import gzip
import json

import pytest
from helpers_config import document as made
from helpers_config import real_tokenizer
from helpers_data import job as job_of
from helpers_data import write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen import plan
from batchgen.feeding.longest import longest_prompt
from batchgen.models.tokenizer import BytesTokenizer
from batchgen.prompting.prompts import PromptBuilder
from batchgen.storage.rundir import RunDirectory

ROOM = 2000


class Counting(BytesTokenizer):
    def __init__(self):
        super().__init__()
        self.encoded = []

    def encode_batch(self, texts):
        self.encoded += texts
        return super().encode_batch(texts)


def planned(folder, job):
    with RunDirectory(folder / "out") as run:
        return plan.make(job, run)


def builder(job, tokenizer=None, room=ROOM):
    return PromptBuilder(job, tokenizer or BytesTokenizer(), max_prompt_tokens=room)


def lengths(job, planned_files, prompts):
    """Of every prompt, by encoding every document."""
    from batchgen.sources import open_source

    found = [
        prompts.prepare([(document, split.input)])[0]
        for split in planned_files.splits
        for document in open_source(job, split.input, split.source).read(split)
    ]
    return [len(one.prompt_ids) for one in found]


def texts(folder, *texts, **sections):
    write_lines(folder / "a.jsonl", *[{"id": n, "text": text} for n, text in enumerate(texts)])
    return job_of(folder, **sections)


def test_it_is_the_longest_of_all_files(tmp_path):
    job = texts(tmp_path, *["x" * (30 + n) for n in range(200)])
    write_lines(tmp_path / "b.jsonl", {"id": "b", "text": "y" * 777})
    at = planned(tmp_path, job)
    assert longest_prompt(job, at, builder(job), at_most=ROOM) == max(lengths(job, at, builder(job))) == 777 + 3


def test_only_documents_that_could_be_longer_are_encoded(tmp_path):
    job = texts(tmp_path, "x" * 500, *["y" * 100 for _ in range(500)], "z" * 600)
    tokenizer = Counting()
    assert longest_prompt(job, planned(tmp_path, job), builder(job, tokenizer), at_most=ROOM) == 600 + 3
    encoded = [text for text in tokenizer.encoded if len(text) > 50]
    assert len(encoded) < 70  # the first batch is encoded whole
    assert sum(text.startswith("z") for text in encoded) == 1


def test_nothing_is_read_once_a_prompt_fills_the_room(tmp_path):
    job = texts(tmp_path, "x" * 5000)
    (tmp_path / "b.jsonl").write_bytes(b'{"id": "b", "text": "%s"}\n' % (b"z" * 600))
    at = planned(tmp_path, job)
    (tmp_path / "b.jsonl").unlink()
    assert longest_prompt(job, at, builder(job), at_most=ROOM) == ROOM


def test_documents_that_are_never_sent_do_not_count(tmp_path):
    job = texts(tmp_path, "x" * 100, "\u200b" * 300, 7, None)
    with (tmp_path / "a.jsonl").open("ab") as stream:
        stream.write(b'{"id": 9, "text": "%s"\n' % (b"w" * 900))
    assert longest_prompt(job, planned(tmp_path, job), builder(job), at_most=ROOM) == 100 + 3


def test_a_file_that_is_cut_short_counts_as_far_as_it_goes(tmp_path):
    lines = b"".join(json.dumps({"id": n, "text": f"{n} " * 40}).encode() + b"\n" for n in range(3000))
    packed = gzip.compress(lines, 1)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    write_lines(tmp_path / "b.jsonl", {"id": "b", "text": "y" * 40})
    job = job_of(tmp_path, tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl")
    assert longest_prompt(job, planned(tmp_path, job), builder(job), at_most=ROOM) > 100


def test_the_prompt_around_the_text_counts(tmp_path):
    prompt = {"system": "Write.", "user": "{{ title }}: {{ text }}"}
    write_lines(
        tmp_path / "a.jsonl", {"id": 1, "text": "x" * 90, "title": "t"}, {"id": 2, "text": "x" * 80, "title": "t" * 50}
    )
    job = job_of(tmp_path, {"path": str(tmp_path / "a.jsonl"), "keep": ["title"]}, prompt=prompt)
    at = planned(tmp_path, job)
    assert longest_prompt(job, at, builder(job), at_most=ROOM) == max(lengths(job, at, builder(job))) == 80 + 52 + 8 + 3


ODD = st.text(st.sampled_from("ab \n\t<|>ſﬃ㎢ﷺ́한각é😀\u200b"), max_size=60)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ODD, min_size=1, max_size=6))
def test_no_text_of_a_real_model_is_longer_than_its_bound(tmp_path, drawn):
    job = texts(tmp_path, *drawn)
    prompts = builder(job, real_tokenizer(), room=500)
    from batchgen.sources import open_source

    for split in planned(tmp_path, job).splits:
        for document in open_source(job, 0, split.source).read(split):
            ids = prompts.prepare([(dataclasses.replace(document), 0)])[0].prompt_ids
            assert len(ids) <= prompts.bound(document)


@pytest.mark.parametrize("text", ["ﷺ" * 10, "ſ" * 10, "e\u0301" * 10])
def test_the_bound_allows_for_a_tokenizer_that_normalizes(tmp_path, text):
    import unicodedata

    from batchgen.prompting.prompts import _most_tokens

    for form in ("NFC", "NFKC"):
        assert _most_tokens(text) >= len(unicodedata.normalize(form, text).encode())
    del tmp_path


def test_a_document_in_pieces_can_need_all_the_context(tmp_path):
    """How long the prompts are that put its answers together is known when these are there."""
    long = {"long_documents": {"policy": "map_reduce", "overlap_tokens": 0}}
    job = texts(tmp_path, "x" * (ROOM + 100), **long)
    sent = builder(job).prepare([(made("x" * (ROOM + 100)), 0)])[0].pieces
    assert max(map(len, sent)) < ROOM
    assert longest_prompt(job, planned(tmp_path, job), builder(job), at_most=ROOM) == ROOM
    (tmp_path / "out/plan.json").unlink()
    job = texts(tmp_path, "x" * 400, **long)
    assert longest_prompt(job, planned(tmp_path, job), builder(job), at_most=ROOM) < 450
