"""What the host costs: batchgen on an engine without latency beside a bare loop, and its peak memory.

    python benchmarks/host.py speed  [--documents 100000] [--rounds 3] [--model models/smollm2-135m-instruct]
    python benchmarks/host.py memory [--documents 1000000 3000000]

The bare loop reads the same Parquet file, renders the same prompt (its chat template once), encodes it with the same
tokenizer in batches and writes a row for each document. Both run as child processes, in turns; times are those of the
whole process. `memory` gives the peak (VmHWM) of a whole run on the fake engine, and what each further document adds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

SYSTEM = "You write short factual summaries."
USER = "{{ title }}\n\n{{ text }}\n\nSummarize the text above in one sentence."
_WORDS = [
    "the",
    "harbour",
    "board",
    "met",
    "on",
    "a",
    "wet",
    "Tuesday",
    "and",
    "agreed",
    "to",
    "repair",
    "metres",
    "of",
    "quay",
    "wall",
    "before",
    "winter",
    "at",
    "cost",
    "shared",
    "by",
    "town",
    "county",
    "and",
    "shipping",
    "line",
    "after",
    "a",
    "long",
    "debate",
    "over",
    "sand",
    "depth",
    "tides",
    "fees",
    "and",
    "jobs",
]
_CHUNK = 50_000


def text(n: int, words: int) -> str:
    """About `words` words, another text for every n."""
    picked = (_WORDS[(n * 7 + k * k + k * (n % 13)) % len(_WORDS)] for k in range(words))
    return f"Case {n}: {' '.join(picked)}."


def write_documents(path: Path, count: int, words: int) -> Path:
    schema = pa.schema([("id", pa.int64()), ("title", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, count, _CHUNK):
            numbers = range(begin, min(begin + _CHUNK, count))
            columns = [list(numbers), [f"Minutes {n}" for n in numbers], [text(n, words) for n in numbers]]
            writer.write_table(pa.table(columns, schema=schema))
    return path


def write_job(folder: Path, documents: Path, model: str | None) -> Path:
    job = {
        "name": "host",
        "input": [{"path": str(documents), "id_field": "id", "keep": ["title"]}],
        "prompt": {"system": SYSTEM, "user": USER},
        "engine": {"backend": "fake", "args": {"max_model_len": 4096, "max_num_seqs": 1024, "model": model}},
        "sampling": {"max_tokens": 64},
        "output": {"dir": str(folder / "out")},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def bare(documents: Path, out: Path, model: str) -> None:
    """The loop a person writes first: read, render, encode in batches, write."""
    from jinja2 import Environment
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "@@"}]
    frame = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, after = frame.split("@@")
    template = Environment(autoescape=False).from_string(USER)
    writer = None
    for batch in pq.ParquetFile(documents).iter_batches(2000, columns=["id", "title", "text"]):
        rows = batch.to_pylist()
        prompts = [before + template.render(row) + after for row in rows]
        encoded = tokenizer(prompts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        table = pa.table(
            {
                "id": [row["id"] for row in rows],
                "title": [row["title"] for row in rows],
                "summary": [row["text"][:120] for row in rows],
                "prompt_tokens": [len(ids) for ids in encoded],
            }
        )
        writer = writer or pq.ParquetWriter(out, table.schema, compression="zstd")
        writer.write_table(table)
    assert writer is not None
    writer.close()


def timed(*command: str) -> float:
    begin = time.monotonic()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return time.monotonic() - begin


def speed(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = write_documents(folder / "documents.parquet", args.documents, args.words)
        job = write_job(folder, documents, args.model)
        ratios = []
        for number in range(args.rounds):
            theirs = timed(__file__, "bare", str(documents), str(folder / "bare.parquet"), args.model)
            ours = timed("-m", "batchgen", "run", str(job), "--fresh")
            ratios.append(theirs / ours)
            print(
                f"round {number + 1}: bare loop {args.documents / theirs:,.0f} docs/s, "
                f"batchgen {args.documents / ours:,.0f} docs/s, ratio {ratios[-1]:.3f}",
                flush=True,
            )
        print(f"batchgen / bare loop: median {statistics.median(ratios):.3f}")


def peak(job: Path) -> int:
    """VmHWM of a whole run, in bytes: ru_maxrss of a child starts at its parent's."""
    code = (
        "import re, sys; from batchgen.cli import main\n"
        "try: main()\n"
        "finally: print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, "run", str(job)], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) * 1024


def memory(args: argparse.Namespace) -> None:
    peaks = {}
    for count in sorted(args.documents):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            job = write_job(folder, write_documents(folder / "documents.parquet", count, args.words), None)
            begin = time.monotonic()
            peaks[count] = peak(job)
            again = peak(job)
        print(
            json.dumps({
                "documents": count, "seconds": round(time.monotonic() - begin), "peak": peaks[count],
                "peak_of_second_start": again,
            }),
            flush=True,
        )  # fmt: skip
    low, high = min(peaks), max(peaks)
    if low < high:
        print(f"{(peaks[high] - peaks[low]) / (high - low):.1f} bytes a document between {low:,} and {high:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("speed")
    one.add_argument("--documents", type=int, default=100_000)
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--words", type=int, default=80)
    one.add_argument("--model", default="models/smollm2-135m-instruct")
    one.set_defaults(run=speed)
    two = commands.add_parser("memory")
    two.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 3_000_000])
    two.add_argument("--words", type=int, default=16)
    two.set_defaults(run=memory)
    three = commands.add_parser("bare")
    three.add_argument("documents", type=Path)
    three.add_argument("out", type=Path)
    three.add_argument("model")
    three.set_defaults(run=lambda args: bare(args.documents, args.out, args.model))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
