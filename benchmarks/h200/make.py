"""Documents and the 8B shape for the jobs beside this file, in outputs/h200.

long.jsonl: 8,192 documents of 900 words, longer than the context of the 8B jobs. abstracts.jsonl: 9,856 documents of 60
to 300 words, each beginning with a number of its own, so that no two share more than the instruction.
"""

import json
import random
import shutil
from pathlib import Path

HERE = Path(__file__).parent
OUT = Path("outputs/h200")
TOKENIZER = Path("models/smollm2-135m-instruct")
_STEMS = [
    "harbour",
    "board",
    "quay",
    "wall",
    "winter",
    "county",
    "debate",
    "sand",
    "depth",
    "tide",
    "fee",
    "job",
    "lock",
]
_ENDS = ["", "s", "ed", "ing", "er", "ly", "ful", "less", "ness", "able"]


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_STEMS) + rng.choice(_ENDS) for _ in range(words))


def main() -> None:
    rng = random.Random(5)
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "long.jsonl").open("w") as lines:
        for n in range(8192):
            lines.write(json.dumps({"id": f"d{n}", "text": f"{n} {text(rng, 900)}"}) + "\n")
    with (OUT / "abstracts.jsonl").open("w") as lines:
        for n in range(9856):
            record = {"id": f"a{n}", "title": f"Abstract {n}", "text": text(rng, rng.randint(60, 300))}
            lines.write(json.dumps(record) + "\n")
    shape = OUT / "llama-3.1-8b-shape"
    shape.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TOKENIZER / name, shape / name)
    shutil.copy(HERE / "config.json", shape / "config.json")


if __name__ == "__main__":
    main()
