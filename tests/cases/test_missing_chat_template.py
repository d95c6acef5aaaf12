"""A model without a chat template is found before a document is read (vllm-project/vllm#39279, #7978)."""

import hashlib
import json
import sys

import pytest
from helpers_run import by_id, command, record, start, watch_requests, write_job, write_jsonl
from helpers_tokenizers import CHATML, FAMILIES, model

from batchgen.errors import ConfigError
from batchgen.executors.validation import validate


@pytest.fixture
def job(tmp_path):
    """A job on a model with this chat template, or with none."""

    def make(template, **prompt):
        folder = model("chatml", tmp_path / "model", template=template)
        docs = write_jsonl(tmp_path / "in/a.jsonl", map(record, range(3)))
        engine = {"backend": "fake", "args": {"model": str(folder)}}
        prompt = {"system": "You write summaries.", "user": "{{ text }}"} | prompt
        return write_job(tmp_path, [docs], engine=engine, prompt=prompt)

    return make


@pytest.mark.parametrize("name", ["run", "validate"])
def test_both_commands_tell_it_at_once_with_the_two_ways_out(job, out, name):
    done = command(name, job(None))
    told = {"run": done.stderr, "validate": done.stdout}[name]
    assert (done.returncode, done.stdout + done.stderr) == (78, told)
    assert "engine.args.model: " in told
    assert "the model has no chat template" in told
    assert "prompt.chat_template: FILE" in told
    assert "prompt.mode: completion" in told
    assert not out.exists()


def test_it_is_told_without_loading_what_is_heavy(job, monkeypatch):
    path = job(None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="the model has no chat template"):
        start(path)


def test_the_first_way_out_is_a_file(job, out, tmp_path, monkeypatch):
    (tmp_path / "own.jinja").write_text(CHATML)
    monkeypatch.chdir(tmp_path)
    assert start(job(None, chat_template="own.jinja")).exit_status == 0
    run = json.loads((out / "run.json").read_text())
    digest = hashlib.sha256(CHATML.encode()).hexdigest()
    assert run["job"]["prompt"]["chat_template"] == "own.jinja"
    assert run["job"]["prompt"]["chat_template_sha256"] == digest
    assert run["fingerprint"]["prompt.chat_template"] == digest


def test_another_file_is_another_run_and_the_same_under_another_name_is_not(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jinja").write_text(CHATML)
    (tmp_path / "renamed.jinja").write_text(CHATML)
    start(job(None, chat_template="own.jinja"))
    assert start(job(None, chat_template="renamed.jinja")).exit_status == 0
    (tmp_path / "own.jinja").write_text(CHATML + " ")
    with pytest.raises(ConfigError, match=r"prompt\.chat_template: "):
        start(job(None, chat_template="own.jinja"))


def test_the_second_way_out_is_plain_text(job, out, monkeypatch):
    sent = watch_requests(monkeypatch)
    assert start(job(None, mode="completion")).exit_status == 0

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(out.parent / "model"))
    shown = sorted(tokenizer.decode(list(request.prompt_ids)) for request in sent)
    assert shown == sorted(f"You write summaries.\n\n{record(n)['text']}" for n in range(3))
    assert json.loads((out / "run.json").read_text())["job"]["prompt"]["chat_template_sha256"] is None


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML


def test_a_template_that_refuses_a_system_turn_gets_it_in_the_user_turn(job, out, monkeypatch):
    sent = watch_requests(monkeypatch)
    assert validate(job(REFUSES), [], quick=False)[0]["valid"]
    assert sent == []
    start(job(REFUSES))
    assert {row["status"] for row in by_id(out).values()} == {"ok"}

    from transformers import AutoTokenizer

    shown = AutoTokenizer.from_pretrained(str(out.parent / "model")).decode(list(sent[0].prompt_ids))
    assert shown.startswith("<|im_start|>user\nYou write summaries.\n\nThe harbour board ")


def test_a_template_that_always_fails_is_told_once_and_not_for_each_document(job, monkeypatch):
    sent = watch_requests(monkeypatch)
    broken = job("{{ raise_exception('never') }}")
    (fault,) = validate(broken, [], quick=False)[0]["faults"]
    assert fault["fault"] == "the chat template fails: never"
    assert start(broken).exit_status == 78
    assert sent == []


def test_the_template_of_the_model_is_part_of_the_record_too(job, out):
    start(job(FAMILIES["chatml"].template))
    run = json.loads((out / "run.json").read_text())
    assert run["job"]["prompt"]["chat_template_sha256"] == hashlib.sha256(CHATML.encode()).hexdigest()
    assert run["fingerprint"]["prompt.chat_template"] is None
    assert run["fingerprint"]["model.chat_template.jinja"] == hashlib.sha256(CHATML.encode()).hexdigest()
