"""Which chat template a job uses is known before anything heavy is loaded, and so is that there is none."""

import hashlib
import json

import pytest
from helpers_config import line_of, load_text
from helpers_tokenizers import CHATML, save

from batchgen.errors import ConfigError
from batchgen.models.chat_template import check, find
from batchgen.models.model import resolve

JOB = """\
name: demo
input: [{path: a.jsonl}]
prompt:
  mode: chat
  chat_template: own.jinja
  user: "{{ text }}"
engine:
  args:
    model: MODEL
output: {dir: out}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def found(folder, text, *sets):
    file = load_text(folder, text.replace("MODEL", str(folder / "model")), *sets)
    (folder / "model").mkdir(exist_ok=True)
    check(file.job, file.origin)
    return find(file.job, file.origin, resolve(str(folder / "model"), None))


def refused(folder, text=JOB, *sets):
    with pytest.raises(ConfigError) as caught:
        found(folder, text, *sets)
    return str(caught.value)


WITHOUT = JOB.replace("  chat_template: own.jinja\n", "")


def test_the_file_of_the_job_is_used_and_known_by_its_hash(tmp_path):
    (tmp_path / "own.jinja").write_text(CHATML)
    template = found(tmp_path, JOB)
    assert (template.text, template.given) == (CHATML, True)
    assert template.sha256 == hashlib.sha256(CHATML.encode()).hexdigest()


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "{{ raise_exception('no') }}{{ strftime_now('%Y') }}{{ messages | tojson(indent=2) }}",
    ],
)
def test_what_transformers_templates_may_use_is_no_mistake(tmp_path, text):
    (tmp_path / "own.jinja").write_text(text)
    assert found(tmp_path, JOB).text == text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file or directory (working directory "),
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"\xff\xfe", "it is no UTF-8 text"),
        (b"{% for m in messages %}\n{{ m.content", "own.jinja, line 2: "),
        (b"\n\n{% if %}", "own.jinja, line 3: "),
        (b"{{ messages | nofilter }}", "own.jinja, line 1: No filter named 'nofilter'"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_line_and_key(tmp_path, content, told):
    if content is not None:
        (tmp_path / "own.jinja").write_bytes(content)
    error = refused(tmp_path)
    line = line_of(JOB, "chat_template:")
    assert error.startswith(f"{tmp_path / 'job.yaml'}, line {line}: prompt.chat_template: own.jinja")
    assert told in error


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "own.jinja").mkdir()
    assert "prompt.chat_template: own.jinja: Is a directory" in refused(tmp_path)


def test_a_file_from_the_command_line_is_told_with_its_option(tmp_path):
    error = refused(tmp_path, WITHOUT, "prompt.chat_template=other.jinja")
    assert error.startswith("--set prompt.chat_template: other.jinja: No such file")


def test_a_template_and_completion_contradict_each_other(tmp_path):
    error = refused(tmp_path, JOB, "prompt.mode=completion")
    line = line_of(JOB, "chat_template:")
    assert error.startswith(f"{tmp_path / 'job.yaml'}, line {line}: prompt.chat_template: prompt.mode: completion")


def test_completion_needs_no_template(tmp_path):
    assert found(tmp_path, WITHOUT, "prompt.mode=completion") is None


def write_config(folder, value):
    (folder / "model").mkdir()
    (folder / "model/tokenizer_config.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"},
        {"chat_template": None},
        {"chat_template": [{"name": "tool_use", "template": CHATML}]},
    ],
)
def test_a_model_without_one_is_refused_with_both_ways_out(tmp_path, config):
    if config is not None:
        write_config(tmp_path, config)
    error = refused(tmp_path, WITHOUT)
    line = line_of(WITHOUT, "model:")
    assert error.startswith(f"{tmp_path / 'job.yaml'}, line {line}: engine.args.model: {tmp_path / 'model'}: ")
    assert "the model has no chat template" in error
    assert "prompt.chat_template: FILE" in error
    assert "prompt.mode: completion" in error


@pytest.mark.parametrize("value", [CHATML, [{"name": "default", "template": CHATML}, {"name": "rag", "template": "x"}]])
def test_a_template_in_the_tokenizers_configuration_is_found(tmp_path, value):
    write_config(tmp_path, {"chat_template": value})
    template = found(tmp_path, WITHOUT)
    assert (template.text, template.given) == (CHATML, False)


def test_the_models_own_file_is_found_before_its_configuration(tmp_path):
    write_config(tmp_path, {"chat_template": "x"})
    (tmp_path / "model/chat_template.jinja").write_text(CHATML)
    assert found(tmp_path, WITHOUT).text == CHATML


def test_what_is_found_is_what_the_tokenizer_uses(tmp_path):
    from batchgen.models.tokenizer import HuggingFaceTokenizer

    save("chatml", tmp_path / "model")
    assert found(tmp_path, WITHOUT).text == HuggingFaceTokenizer(tmp_path / "model")._tokenizer.chat_template


def test_a_damaged_configuration_is_told(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer_config.json").write_text("[")
    assert f"{tmp_path / 'model/tokenizer_config.json'}: no tokenizer configuration" in refused(tmp_path, WITHOUT)


def test_code_of_the_model_may_have_one_that_no_file_tells(tmp_path):
    assert found(tmp_path, WITHOUT, "engine.args.trust_remote_code=true") is None


def test_without_a_model_there_is_none(tmp_path):
    file = load_text(tmp_path, WITHOUT)
    assert find(file.job, file.origin, None) is None
