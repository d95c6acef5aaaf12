"""Every key of docs/config.md does something: each is set in a whole run on the fake engine, and something changes.

A new key needs a function here:

    @effect("section.key")
    def _(bench):
        assert bench.run("section.key=…").rows != bench.run().rows

`bench.run` gives --set values to a run of six short documents, each time in a folder of its own; say `into=` to start
in a folder that has a run. The test of what a key does in all its cases belongs elsewhere.
"""

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers_lora import write_adapter
from helpers_run import record, rows, start, write_job, write_jsonl
from helpers_tokenizers import model

from batchgen.errors import BatchgenError, ConfigError, EngineError, FingerprintError, InputError, Interrupted
from batchgen.executors import checking
from batchgen.job import config, jobfile, schema
from batchgen.lifecycle import Stop

EFFECTS = {}


def effect(key):
    """Enter a test under the key it is for."""

    def enter(test):
        assert key not in EFFECTS, f"{key} is entered twice"
        EFFECTS[key] = test
        return test

    return enter


def keys() -> list[str]:
    """Dotted keys of the schema that hold values, and the sections that take vLLM's names."""
    found = []
    for heading, section in schema.sections():
        at = "" if heading == "Top level" else heading.partition(" (")[0]
        found += [at] if section.model_config.get("extra") == "allow" else []
        found += [
            f"{at}.{name}".lstrip(".")
            for name, field in section.model_fields.items()
            if not list(config.sections_of(field.annotation))
        ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("key", keys())
def test_a_key_changes_what_a_run_does(key, bench):
    if key not in EFFECTS:
        pytest.fail(f"{key} is used by no test: add a function with @effect({key!r}) to {Path(__file__).name}")
    EFFECTS[key](bench)


def test_no_effect_is_tested_of_a_key_that_is_gone():
    assert set(EFFECTS) - set(keys()) == set()


@dataclass
class Done:
    """A run that has ended, also by an error."""

    folder: Path
    error: BatchgenError | None
    exit_status: int
    seconds: float

    @property
    def rows(self) -> list[dict]:
        """By id; the columns that tell apart two runs of one job are left out."""
        left_out = {"finished_at", "fingerprint", "cached_tokens"}
        found = [{name: value for name, value in row.items() if name not in left_out} for row in rows(self.folder)]
        return sorted(found, key=lambda row: (row["id"] or "", row["doc_key"]))

    @property
    def report(self) -> dict:
        return json.loads((self.folder / "report.json").read_text())

    @property
    def parts(self) -> int:
        return len([*self.folder.glob("summaries/part-*")])

    def column(self, name) -> list:
        return [row[name] for row in self.rows]


class Bench:
    """Six documents of a hundred characters and a job for them, with what keys of the inputs need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.documents = folder / "a.jsonl"
        self.runs = 0
        nested = {"body": {"text": "Another text, of the quay walls and of what they cost."}}
        write_jsonl(self.documents, [record(n, number=n, **nested) for n in range(6)])
        self.job = write_job(folder, [{"path": str(self.documents), "id_field": "id", "keep": ["title"]}])

    def run(self, *sets, into: str | None = None, stop: Stop | None = None) -> Done:
        self.runs += 1
        folder = self.folder / (into or f"out-{self.runs}")
        began, error = time.monotonic(), None
        try:
            status = start(self.job, f"output.dir={folder}", *sets, stop=stop).exit_status
        except BatchgenError as e:
            error, status = e, e.exit_status
        return Done(folder, error, status, time.monotonic() - began)

    def check(self, *sets) -> checking.Checked:
        return checking.check(jobfile.load(self.job, sets))


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@effect("name")
def _(bench):
    assert bench.run("name=other").report["name"] == "other"


@effect("input.path")
def _(bench):
    other = write_jsonl(bench.folder / "b.jsonl", [record(n) for n in range(6, 8)])
    assert bench.run().column("id") == [f"d{n}" for n in range(6)]
    assert bench.run(f"input.0.path={other}").column("id") == ["d6", "d7"]


def data_set(*, id_field="id", **dataset) -> str:
    """A --set that puts a data set in the place of the input."""
    value = {"dataset": dataset, "id_field": id_field, "keep": ["title"], "text_field": "text"}
    return f"input.0={json.dumps(value)}"


@effect("input.dataset.path")
def _(bench):
    files = str(bench.documents)
    assert bench.run(data_set(path="json", data_files=files)).column("id") == [f"d{n}" for n in range(6)]
    assert set(bench.run(data_set(path="text", data_files=files, id_field=None)).column("id")) == {None}


@effect("input.dataset.name")
def _(bench):
    folder = two_files(bench)
    configs = "".join(f"- {{config_name: {name}, data_files: {name}.jsonl}}\n" for name in ("one", "two"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name, ids in (("one", ["d6"]), ("two", ["d7", "d8"])):
        assert bench.run(data_set(path=str(folder), name=name)).column("id") == ids


def two_files(bench) -> Path:
    write_jsonl(bench.folder / "set/one.jsonl", [record(6)])
    return write_jsonl(bench.folder / "set/two.jsonl", [record(7), record(8)]).parent


@effect("input.dataset.data_dir")
def _(bench):
    folder = two_files(bench)
    assert bench.run(data_set(path="json", data_dir=str(folder))).column("id") == ["d6", "d7", "d8"]


@effect("input.dataset.data_files")
def _(bench):
    folder = two_files(bench)
    for files, ids in (("one.jsonl", ["d6"]), (["two.jsonl"], ["d7", "d8"]), ("*", ["d6", "d7", "d8"])):
        assert bench.run(data_set(path="json", data_dir=str(folder), data_files=files)).column("id") == ids


@effect("input.dataset.split")
def _(bench):
    files = {name: str(two_files(bench) / f"{name}.jsonl") for name in ("one", "two")}
    for split, ids in (("one", ["d6"]), ("two", ["d7", "d8"])):
        assert bench.run(data_set(path="json", data_files=files, split=split)).column("id") == ids


@effect("input.dataset.revision")
def _(bench):
    """The Hub is not reached: two files stand for two commits of a data set there."""
    import datasets

    folder, real = two_files(bench), datasets.load_dataset_builder
    commits = {"a" * 40: "one", "b" * 40: "two"}

    def load_dataset_builder(path, revision):
        return real("json", data_files=str(folder / f"{commits[revision]}.jsonl"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
        found = [bench.run(data_set(path="org/data", revision=commit)).column("id") for commit in commits]
    assert found == [["d6"], ["d7", "d8"]]


@effect("input.id_field")
def _(bench):
    found = bench.run("input.0.id_field=number")
    assert (found.column("id"), set(found.column("id_type"))) == ([str(n) for n in range(6)], {"int"})
    assert set(bench.run("input.0.id_field=~").column("id")) == {None}


@effect("input.text_field")
def _(bench):
    short, long = bench.run("input.0.text_field=body.text"), bench.run()
    assert max(short.column("prompt_tokens")) < min(long.column("prompt_tokens"))


@effect("input.keep")
def _(bench):
    found = bench.run("input.0.keep={title: title, number: which}")
    assert found.column("which") == [str(n) for n in range(6)]
    assert "which" not in bench.run().rows[0]


@effect("input.on_error")
def _(bench):
    (bench.folder / "b.parquet").write_bytes(b"")
    inputs = (f"input.0.path={bench.folder}/[ab].*",)
    assert isinstance(bench.run(*inputs).error, InputError)
    found = bench.run("input.0.on_error=skip", *inputs)
    assert (found.error, found.exit_status, len(found.rows)) == (None, InputError.exit_status, 6)


@effect("input.on_duplicate")
def _(bench):
    write_jsonl(bench.documents, [record(n) for n in (0, 1, 0)])
    assert bench.run().column("error_type").count("duplicate_id") == 1
    found = bench.run("input.0.on_duplicate=refuse")
    assert (type(found.error), found.rows) == (InputError, [])


@effect("input.min_chars")
def _(bench):
    found = bench.run("input.0.min_chars=1000")
    assert set(found.column("error_type")) == {"short"}


@effect("prompt.mode")
def _(bench):
    chat, plain = bench.run("prompt.mode=chat"), bench.run("prompt.mode=completion")
    fewer = [a - b for a, b in zip(chat.column("prompt_tokens"), plain.column("prompt_tokens"), strict=True)]
    assert set(fewer) == {5 - len("\n\n")}  # a control token each around two turns, and one before the answer


@effect("prompt.chat_template")
def _(bench):
    use = f"engine.args.model={model('chatml', bench.folder / 'model')}"
    (bench.folder / "own.jinja").write_text("<|im_start|>{{ messages[-1].content }}<|im_end|>")
    own, other = bench.run(use), bench.run(use, f"prompt.chat_template={bench.folder / 'own.jinja'}")
    assert max(other.column("prompt_tokens")) < min(own.column("prompt_tokens"))


@effect("long_documents.policy")
def _(bench):
    found = {}
    for policy in ("truncate", "fail", "skip"):
        done = bench.run(f"long_documents.policy={policy}", "engine.args.max_model_len=200")
        found[policy] = {*zip(done.column("status"), done.column("error_type"), strict=True)}
    assert found == {
        "truncate": {("ok", None)},
        "fail": {("failed", "document_too_long")},
        "skip": {("skipped", "document_too_long")},
    }


LONG = "engine.args.max_model_len=300"


def in_pieces(bench, *sets, policy="map_reduce"):
    """A run in which each document has a text of some twenty sentences, and a context for a third of it."""
    write_jsonl(bench.documents, [record(n, text=" ".join([record(n)["text"]] * 9)) for n in range(6)])
    return bench.run(f"long_documents.policy={policy}", LONG, "sampling.max_tokens=40", *sets)


@effect("long_documents.keep")
def _(bench):
    write_jsonl(bench.documents, [record(n, text=f"canary-1 {'word ' * 90} canary-2") for n in range(6)])
    copies = ("engine.fake.copies='canary-\\d'", LONG)
    assert set(bench.run(*copies).column("summary")) == {"canary-1"}
    for keep in ("head_tail", "middle_out"):
        assert set(bench.run(f"long_documents.keep={keep}", *copies).column("summary")) == {"canary-1 canary-2"}


@effect("long_documents.overlap_tokens")
def _(bench):
    none, some = in_pieces(bench, "long_documents.overlap_tokens=0"), in_pieces(bench)
    assert min(some.column("prompt_tokens")) > max(none.column("prompt_tokens"))


@effect("long_documents.max_requests")
def _(bench):
    assert set(in_pieces(bench).column("status")) == {"ok"}
    found = in_pieces(bench, "long_documents.max_requests=5")
    assert set(found.column("error_type")) == {"document_too_long"}


@effect("long_documents.max_depth")
def _(bench):
    assert set(in_pieces(bench).column("status")) == {"ok"}
    assert set(in_pieces(bench, "long_documents.max_depth=1").column("error_type")) == {"not_reduced"}


def prompts_hold(bench, key, template, policy):
    words = ("engine.fake.copies=Barometer",)
    assert "Barometer" not in in_pieces(bench, *words, policy=policy).column("summary")
    found = in_pieces(bench, f"long_documents.{key}='Barometer {template}'", *words, policy=policy)
    return found.column("summary")


@effect("long_documents.piece")
def _(bench):
    assert set(prompts_hold(bench, "piece", "{{ text }}", "map_reduce")) == {"Barometer"}  # by way of the answers


@effect("long_documents.reduce")
def _(bench):
    assert set(prompts_hold(bench, "reduce", "{{ text }}", "map_reduce")) == {"Barometer"}


@effect("long_documents.refine")
def _(bench):
    assert set(prompts_hold(bench, "refine", "{{ summary }} {{ text }}", "refine")) == {"Barometer"}


@effect("engine.fake.copies")
def _(bench):
    assert set(bench.run("engine.fake.copies='day (\\d)'").column("summary")) == {f"day {n}" for n in range(6)}


@effect("prompt.system")
def _(bench):
    with_it, without = bench.run("prompt.system=Write in French."), bench.run("prompt.system=~")
    more = [a - b for a, b in zip(with_it.column("prompt_tokens"), without.column("prompt_tokens"), strict=True)]
    assert set(more) == {len("Write in French.") + 2}


@effect("prompt.user")
def _(bench):
    with_it, without = bench.run("prompt.user='{{ text }} Now.'"), bench.run("prompt.user='{{ text }}'")
    more = [a - b for a, b in zip(with_it.column("prompt_tokens"), without.column("prompt_tokens"), strict=True)]
    assert set(more) == {len(" Now.")}


@effect("engine.backend")
def _(bench):
    assert bench.check().model is None
    with pytest.raises(ConfigError, match=r"engine\.args\.model: this key is required|vLLM is not installed"):
        bench.check("engine.backend=vllm")


@effect("engine.feed")
def _(bench):
    # The engine dies in the middle of the first window, and before that in no step of its own.
    dies = ("engine.args.max_num_seqs=2", "engine.fake.die_after=3", "engine.fake.lives=1")
    assert len(bench.run("engine.feed=rolling", *dies).rows) == 2
    assert len(bench.run("engine.feed=generate", *dies).rows) == 0


@effect("engine.args")
def _(bench):
    assert set(map(tuple, bench.run("engine.args.max_model_len=200").column("flags"))) == {("document_truncated",)}
    assert set(map(tuple, bench.run().column("flags"))) == {()}


@effect("engine.profile")
def _(bench):
    assert "max_num_batched_tokens" not in bench.run().report["engine"]["args"]
    found = bench.run("engine.profile=low_memory")
    assert found.report["engine"]["args"]["max_num_batched_tokens"] == 2048


@effect("engine.replicas_per_gpu")
def _(bench):
    assert bench.run().report["engine"]["replicas"] == 1
    found = bench.run("engine.replicas_per_gpu=2")
    assert found.report["engine"]["replicas"] == 2
    assert found.report["documents"]["ok"] == 6


@effect("engine.adapter")
def _(bench):
    adapter = f"engine.adapter={write_adapter(bench.folder / 'adapter')}"
    bench.run(into="out")
    assert isinstance(bench.run(adapter, into="out").error, FingerprintError)
    assert bench.run(adapter).error is None
    assert isinstance(bench.run("engine.adapter=nowhere").error, ConfigError)


FULL = "engine.fake.start_faults=['CUDA out of memory']"


@effect("engine.adapt")
def _(bench):
    assert bench.run(FULL).exit_status == EngineError.exit_status
    found = bench.run(FULL, "engine.adapt=true")
    assert found.exit_status == 0
    assert [one["argument"] for one in found.report["engine"]["adapted"]] == ["gpu_memory_utilization"]


@effect("engine.fake.start_faults")
def _(bench):
    found = bench.run("engine.fake.start_faults=[the motor is missing]")
    assert (found.exit_status, found.rows) == (EngineError.exit_status, [])
    assert "the motor is missing" in found.report["reason"]


@effect("engine.fake.tells")
def _(bench):
    found = bench.run("engine.fake.tells={preemptions: 3, ttft_s: 0.25, gpus: 2}").report["attempt"]
    assert (found["preemptions"], found["latency"]["ttft"]["count"], found["gpu"]["gpus"]) == (3, 6, 2)


COST = ("engine.fake.tells={gpus: 2}", "report.cost.per_gpu_hour=3600")


@effect("report.cost.per_gpu_hour")
def _(bench):
    assert bench.run().report["cost"] is None
    found = bench.run(*COST).report
    assert found["cost"]["total"] == pytest.approx(found["run"]["gpu"]["gpu_seconds"], rel=0.01)


@effect("report.cost.currency")
def _(bench):
    assert [bench.run(*COST, *more).report["cost"]["currency"] for more in ((), ("report.cost.currency=SEK",))] == [
        "EUR", "SEK",
    ]  # fmt: skip


@effect("engine.fake.docs_per_s")
def _(bench):
    assert bench.run("engine.fake.docs_per_s=10").seconds >= 0.5


@effect("engine.fake.fail_every")
def _(bench):
    found = bench.run("engine.fake.fail_every=3")
    assert sorted(found.column("status")) == ["failed"] * 2 + ["ok"] * 4


@effect("engine.fake.fail_on")
def _(bench):
    found = bench.run("engine.fake.fail_on=day 3 ")
    assert [row["id"] for row in found.rows if row["status"] == "failed"] == ["d3"]


@effect("engine.fake.die_after")
def _(bench):
    assert set(bench.run("engine.fake.die_after=4").column("attempts")) == {1, 2}
    assert set(bench.run().column("attempts")) == {1}


@effect("engine.fake.lives")
def _(bench):
    found = bench.run("engine.fake.die_after=4", "engine.fake.lives=1")
    assert (found.exit_status, len(found.rows)) == (EngineError.exit_status, 4)


@effect("engine.fake.die_on")
def _(bench):
    assert set(bench.run("engine.fake.die_on=day 3 ").column("status")) == {"ok", "failed"}


@effect("engine.fake.hang_on")
def _(bench):
    found = bench.run("engine.fake.hang_on=day 3 ", "engine.stall_s=0.1")
    assert [row["error_type"] for row in found.rows if row["status"] == "failed"] == ["engine_died"]


def told(text, **more):
    return f"engine.fake.answers={json.dumps([{'match': 'day 3 ', 'text': text} | more])}"


@effect("engine.fake.answers.match")
def _(bench):
    assert bench.run(told("Walls.")).column("summary").count("Walls.") == 1
    assert bench.run(told("Walls.", match="repair")).column("summary").count("Walls.") == 6


@effect("engine.fake.answers.text")
def _(bench):
    assert bench.run(told("Stairs.")).column("summary")[3] == "Stairs."


@effect("engine.fake.answers.finish_reason")
def _(bench):
    assert bench.run(told("Walls.", finish_reason="length")).column("flags")[3] == ["summary_cut"]
    assert bench.run(told("Walls.")).column("flags")[3] == []


@effect("answers.reasoning_end")
def _(bench):
    text = told("Walls?</b>Walls.")
    assert bench.run(text).column("summary")[3] == "Walls?</b>Walls."
    found = bench.run(text, "answers.reasoning_end=</b>")
    assert found.column("summary")[3] == "Walls."
    assert found.column("error_type").count("no_answer") == 5


@effect("answers.retry_max_tokens")
def _(bench):
    short = "sampling.max_tokens=5"
    assert set(bench.run(short).column("requests")) == {1}
    found = bench.run(short, "answers.retry_max_tokens=30")
    assert (set(found.column("requests")), set(found.column("finish_reason"))) == ({2}, {"stop"})


@effect("engine.fake.output_tokens_per_s")
def _(bench):
    assert bench.run("engine.fake.output_tokens_per_s=300").seconds >= 6 * 24 / 300


PACKED = ("packing.mode=true", "engine.args.max_model_len=4096", "sampling.max_tokens=200")


@effect("packing.mode")
def _(bench):
    assert set(bench.run().column("pack_size")) == {1}
    assert set(bench.run(*PACKED).column("pack_size")) == {6}
    assert bench.run("packing.mode=auto").report["packing"]["mode"] == "auto"


@effect("packing.max_documents")
def _(bench):
    assert set(bench.run(*PACKED, "packing.max_documents=3").column("pack_size")) == {3}


@effect("packing.max_document_tokens")
def _(bench):
    assert set(bench.run(*PACKED, "packing.max_document_tokens=50").column("pack_size")) == {1}


@effect("packing.max_pack_tokens")
def _(bench):
    assert max(bench.run(*PACKED, "packing.max_pack_tokens=1300").column("pack_size")) in {2, 3, 4}


def told_pack(summaries):
    """The answer to a pack of the documents, as JSON and as lines."""
    lines = "\n".join(f"<{n}>: {summary}" for n, summary in enumerate(summaries, 1))
    items = json.dumps([{"label": f"<{n}>", "summary": summary} for n, summary in enumerate(summaries, 1)])
    told = {"match": "separate requests"}
    return [f"engine.fake.answers={json.dumps([told | {'text': one}])}" for one in (items, lines)]


@effect("packing.answer")
def _(bench):
    as_json, as_lines = told_pack([f"A wall of {n} metres on day {n}." for n in range(6)])
    assert set(bench.run(*PACKED, as_lines, "packing.answer=lines").column("pack_size")) == {6}
    assert set(bench.run(*PACKED, as_lines).column("pack_fallback")) == {"unreadable"}
    assert set(bench.run(*PACKED, as_json, "packing.answer=lines").column("pack_fallback")) == {"unreadable"}


@effect("packing.verify")
def _(bench):
    german, _ = told_pack(["Sonntags", "Am Kai", "Zwei Meter", "Drei Tage", "Vor Winter", "Eine Mauer"])
    assert set(bench.run(*PACKED, german).column("pack_fallback")) == {"unsupported"}
    assert set(bench.run(*PACKED, german, "packing.verify=labels").column("pack_fallback")) == {None}


@effect("engine.stall_s")
def _(bench):
    for seconds in (0.3, 0.8):
        found = bench.run("engine.fake.hang_on=day 3 ", f"engine.stall_s={seconds}")
        assert {f"no sign of work for {seconds} s" in row["error"] for row in found.rows if row["error"]} == {True}


@effect("lifecycle.grace_s")
def _(bench):
    for grace_s, fewer in ((0, True), (60, False)):
        stop = Stop()
        threading.Timer(0.5, stop.request, ["SIGTERM"]).start()
        found = bench.run(f"lifecycle.grace_s={grace_s}", "engine.fake.docs_per_s=4", stop=stop)
        assert found.exit_status == Interrupted.exit_status
        assert (len(found.rows) < 6) is fewer


@effect("failures.strikes")
def _(bench):
    for strikes, attempts in ((1, 3), (3, 5)):
        found = bench.run("engine.fake.die_on=day 3 ", f"failures.strikes={strikes}")
        assert max(found.column("attempts")) == attempts


@effect("sampling")
def _(bench):
    differs(bench, "sampling.top_p", 0.5)


@effect("sampling.temperature")
def _(bench):
    differs(bench, "sampling.temperature", 0.5)


def differs(bench, key, value):
    """The fake engine draws no tokens: what it would not show, the fingerprint does."""
    bench.run(into="out")
    found = bench.run(f"{key}={value}", into="out")
    assert isinstance(found.error, FingerprintError)
    assert f"{key}: " in str(found.error)
    assert str(value) in str(found.error)


@effect("sampling.max_tokens")
def _(bench):
    found = bench.run("sampling.max_tokens=3")
    assert set(found.column("completion_tokens")) == {3}
    assert set(found.column("finish_reason")) == {"length"}


@effect("checkpoint.interval_s")
def _(bench):
    slow = ("engine.args.max_num_seqs=1", "engine.fake.docs_per_s=20")
    assert bench.run("checkpoint.interval_s=0.01", *slow).parts > 1
    assert bench.run(*slow).parts == 1


@effect("checkpoint.rows")
def _(bench):
    assert bench.run("checkpoint.rows=2", "engine.args.max_num_seqs=2").parts == 3
    assert bench.run("engine.args.max_num_seqs=2").parts == 1


@effect("failures.max")
def _(bench):
    fails = "engine.fake.fail_every=3"
    assert [bench.run(fails, f"failures.max={n}").exit_status for n in (0, 1, 2)] == [3, 3, 0]


@effect("metrics.textfile")
def _(bench):
    path = bench.folder / "it.prom"
    assert bench.run(f"metrics.textfile={path}").error is None
    assert 'batchgen_documents_total{run="test",shard="00000",status="ok"} 6.0' in path.read_text()


@effect("output.format")
def _(bench):
    plain, found = bench.run(), bench.run("output.format=jsonl")
    assert found.rows == plain.rows
    assert {path.suffix for path in found.folder.glob("summaries/part-*")} == {".jsonl"}


@effect("output.dir")
def _(bench):
    folder = bench.folder / "elsewhere"
    assert bench.run(f"output.dir={folder}").error is None
    assert len(rows(folder)) == 6
