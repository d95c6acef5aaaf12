"""Peers beside plain `LLM.generate` on the CPU: docs/s on short documents of data/, and the ratio.

    python benchmarks/peers.py RESULTS.json [PEER ...] [--python PYTHON] [--documents 64] [--max-tokens 48]

Each run is a process of its own; `LLM.generate` with everything at once runs before and after each peer, and the ratio
is to the mean of the two. PYTHON is that of an environment in which the peers are installed. Runs are added to those
that RESULTS.json has.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).parent.parent
MODEL = TOP / "models" / "smollm2-135m-instruct"
PEERS = ["vllm_throughput", "ray_data", "datatrove", "transformers_batches"]
ENGINE = {
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 2 << 30,
    "max_num_seqs": 16,
}


def write_prompts(path: Path, documents: int) -> None:
    """The texts of data/ over and over, numbered so that no two prompts are equal, each cut at 1,200 characters."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    files = [TOP / "data" / name for name in ("articles.jsonl", "office.jsonl")]
    texts = [json.loads(line)["text"] for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    with path.open("w", encoding="utf-8") as lines:
        for n in range(documents):
            text = f"[{n}] {texts[n % len(texts)][:1200]}\nSummarize this in two sentences."
            turns = [{"role": "system", "content": "You write short summaries."}, {"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
            lines.write(json.dumps({"id": f"d{n}", "prompt_ids": list(ids)}) + "\n")


def measure(peer: str, options: argparse.Namespace, folder: Path) -> dict:
    """RESULT.json of a run, or its exit status and the last line of what it said."""
    at = folder / peer
    at.mkdir()
    work = {
        "model": str(MODEL),
        "engine_args": ENGINE,
        "prompts_file": str(folder / "prompts.jsonl"),
        "max_tokens": options.max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "out": str(at / "out"),
        "batch": options.batch if peer == "transformers_batches" else None,
    }
    (at / "work.json").write_text(json.dumps(work))
    command = [options.python, "-m", f"batchgen.bench.peers.{peer}", at / "work.json", at / "result.json"]
    with (at / "log").open("wb") as log:
        done = subprocess.run(command, check=False, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": str(TOP)})
    if done.returncode:
        lines = (at / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        found = {"status": done.returncode, "said": lines[-1] if lines else ""}
    else:
        found = json.loads((at / "result.json").read_text())
        found["docs_per_s"] = found["documents"] / found["seconds"]
    at.rename(folder / f"{peer}-{len(list(folder.iterdir()))}")
    print(f"{peer:22}", json.dumps(found), flush=True)
    return {"peer": peer, "load_after": os.getloadavg()[0], **found}


def ratios(runs: list[dict]) -> dict[str, list[float]]:
    """Of each peer's docs/s to those of the runs beside it; runs that failed have none."""
    found = {}
    for before, run, after in zip(runs, runs[1:], runs[2:], strict=False):
        if run["peer"] != "vllm_generate" and all("docs_per_s" in one for one in (before, run, after)):
            ratio = run["docs_per_s"] * 2 / (before["docs_per_s"] + after["docs_per_s"])
            found.setdefault(run["peer"], []).append(round(ratio, 3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16, help="documents a batch of transformers")
    parser.add_argument("peers", nargs="*", default=PEERS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", options.documents)
        runs = [measure("vllm_generate", options, folder)]
        for peer in options.peers:
            runs += [measure(peer, options, folder), measure("vllm_generate", options, folder)]
    if options.results.exists():
        runs = json.loads(options.results.read_text(encoding="utf-8"))["runs"] + runs
    conditions = {
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU",
        "model": MODEL.name,
        "engine_args": ENGINE,
        "documents": options.documents,
        "max_tokens": options.max_tokens,
        "ignore_eos": True,
        "batch_of_transformers": options.batch,
        "python": platform.python_version(),
    }
    found = {"conditions": conditions, "ratios_to_vllm_generate": ratios(runs), "runs": runs}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
