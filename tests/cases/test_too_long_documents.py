"""One document that is too long costs no other its summary (vllm-project/vllm#16732, #16445)."""

import pytest
from helpers_run import by_id, record, start, watch_requests, write_job, write_jsonl

from batchgen.errors import FingerprintError

CONTEXT, ANSWER = 512, 64
LIMIT = CONTEXT - ANSWER
AROUND = len("Be short.") + 5  # bytes of the instruction, and the control tokens of the frame
POLICIES = ["truncate", "fail", "skip"]


def job(tmp_path, *texts, policy, keep="title"):
    docs = write_jsonl(tmp_path / "in/a.jsonl", [record(n) for n in range(6)] + list(texts))
    return write_job(
        tmp_path,
        [{"path": str(docs), "id_field": "id", "keep": [keep]}],
        prompt={"system": "Be short.", "user": "{{ text }}"},
        engine={"backend": "fake", "args": {"max_model_len": CONTEXT, "max_num_seqs": 4}},
        sampling={"max_tokens": ANSWER},
        long_documents={"policy": policy},
        failures={"max": 100},
    )


def of_tokens(name, tokens):
    """A document whose whole prompt has so many tokens."""
    return record(0, id=name, text="x" * (tokens - AROUND))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_very_long_document_harms_no_other(tmp_path, out, policy):
    start(job(tmp_path, record(9, id="long", text="word " * 50_000), policy=policy))
    found = by_id(out)
    assert all(found["str", f"d{n}"]["status"] == "ok" for n in range(6))
    long = found["str", "long"]
    assert long["status"] == {"truncate": "ok", "fail": "failed", "skip": "skipped"}[policy]
    if policy == "truncate":
        assert (long["flags"], long["prompt_tokens"]) == (["document_truncated"], LIMIT)
    else:
        assert long["error_type"] == "document_too_long"
        assert long["error"] == f"the prompt has more than {LIMIT} tokens, {LIMIT} fit beside sampling.max_tokens"
        assert (long["summary"], long["requests"], long["flags"]) == (None, 0, [])


EDGES = [LIMIT - 1, LIMIT, LIMIT + 1, CONTEXT - 1, CONTEXT, CONTEXT + 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens", EDGES)
def test_the_edge_is_that_of_the_final_prompt(tmp_path, out, monkeypatch, policy, tokens):
    sent = watch_requests(monkeypatch)
    outcome = start(job(tmp_path, of_tokens("edge", tokens), policy=policy))
    edge = by_id(out)["str", "edge"]
    # Nothing that the engine is given can be more than it takes.
    assert all(len(request.prompt_ids) + request.max_tokens <= CONTEXT for request in sent)
    if tokens <= LIMIT:
        assert (edge["status"], edge["flags"], edge["prompt_tokens"]) == ("ok", [], tokens)
    elif policy == "truncate":
        assert (edge["status"], edge["flags"], edge["prompt_tokens"]) == ("ok", ["document_truncated"], LIMIT)
    else:
        assert edge["status"] == {"fail": "failed", "skip": "skipped"}[policy]
        assert edge["error"] == f"the prompt has {tokens} tokens, {LIMIT} fit beside sampling.max_tokens"
        assert len(sent) == 6
    flags = outcome.report["documents"]["flags"]
    assert flags.get("document_truncated", 0) == (tokens > LIMIT and policy == "truncate")


def test_another_policy_is_another_run(tmp_path):
    start(job(tmp_path, policy="truncate"))
    with pytest.raises(FingerprintError, match=r'long_documents\.policy: "truncate" → "skip"'):
        start(job(tmp_path, policy="skip"))
