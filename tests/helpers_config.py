"""What tests of the job file, prompts and engines share: a job as text or as value, and documents made by hand."""

import functools
from pathlib import Path

import pytest

from batchgen.data import Document, Prepared
from batchgen.job.config import Job
from batchgen.job.jobfile import JobFile, load

MODEL = Path(__file__).parent.parent / "models" / "smollm2-135m-instruct"

# Every key of the schema stands here once, each on a line of its own.
FULL = """\
name: demo
input:
  - path: data/a.jsonl
    id_field: id
    text_field: body.text
    keep: [title, lang]
    on_error: skip
    on_duplicate: refuse
    min_chars: 5
  - path: data/b.parquet
    keep:
      heading: title
      region: lang
  - dataset:
      path: parquet
      name: small
      data_dir: data/c
      data_files: c.parquet
      split: test
    keep: {theme: title, area: lang}
prompt:
  mode: chat
  chat_template: own.jinja
  system: You write summaries.
  user: "{{ title }} ({{ lang }}): {{ text }}"
engine:
  backend: fake
  feed: rolling
  stall_s: 30.5
  args:
    max_model_len: 512
  profile: low_memory
  replicas_per_gpu: 2
  adapt: true
  adapter: adapters/letters
  fake:
    docs_per_s: 100.5
    fail_every: 7
    fail_on: marsh
    die_after: 900
    lives: 8
    die_on: poison
    hang_on: swamp
    copies: canary-[0-9]+
    answers:
      - match: quay wall
        text: <think>Walls.</think>The wall is new.
        finish_reason: length
    start_faults: [too small]
    tells: {running: 3, ttft_s: 0.25}
    output_tokens_per_s: 5000.5
sampling:
  temperature: 0.5
  max_tokens: 32
long_documents:
  policy: skip
  keep: head_tail
  overlap_tokens: 32
  max_requests: 100
  max_depth: 2
  piece: "Part: {{ text }}"
  reduce: "Parts: {{ text }}"
  refine: "{{ summary }} and {{ text }}"
packing:
  mode: false
  max_documents: 6
  max_document_tokens: 200
  max_pack_tokens: 400
  answer: lines
  verify: labels
answers:
  reasoning_end: </think>
  retry_max_tokens: 96
checkpoint:
  interval_s: 2.5
  rows: 50
failures:
  max: 3
  strikes: 4
lifecycle:
  grace_s: 5.5
metrics:
  textfile: metrics/demo.prom
report:
  cost:
    currency: CHF
    per_gpu_hour: 2.5
output:
  dir: out
  format: jsonl
"""


def line_of(text: str, marker: str) -> int:
    """The line, from 1, in which `marker` stands; it must stand in one place only."""
    assert text.count(marker) == 1, f"{marker!r} stands {text.count(marker)} times"
    return text[: text.index(marker)].count("\n") + 1


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load_text(folder: Path, text: str, *sets: str) -> JobFile:
    return load(write(folder, text), sets)


def job(**sections) -> Job:
    """A job on the fake engine, sections laid over a small one."""
    return Job.model_validate(
        {
            "name": "demo",
            "input": [{"path": "a.jsonl", "keep": ["title"], "min_chars": 1}],
            "prompt": {"system": "You write summaries.", "user": "{{ title }}\n{{ text }}\nSummarize this."},
            "engine": {"backend": "fake"},
            "output": {"dir": "out"},
        }
        | sections
    )


def document(text: str, *, n: int = 0, error=None, **fields) -> Document:
    fields = {"title": "T"} | fields
    return Document(
        key=n.to_bytes(16, "big"),
        content=bytes(8),
        source="a.jsonl",
        place=f"byte {n}",
        id=f"d{n}",
        id_type="str",
        fields=fields,
        text=text,
        keep=fields,
        split=0,
        error=error,
    )


def prepared(text: str = "Some text.", *, n: int = 0, **more) -> Prepared:
    return Prepared(document(text, n=n), [65, 66, 67], **more)


def frame_of(tokenizer, system="Be short.") -> tuple[list[int], list[int]]:
    """The ids before and after every user turn."""
    frame = tokenizer.frame(system, "stand-in")
    return frame.before, frame.after


@functools.cache
def real_tokenizer():
    """The demo model's tokenizer, loaded once for all tests; skips where the model is not there."""
    from batchgen.models.tokenizer import HuggingFaceTokenizer

    need_model()
    return HuggingFaceTokenizer(MODEL)


def need_model() -> None:
    if not (MODEL / "config.json").exists():
        pytest.skip("the demo model is not there: make model")
