"""Documents and the 8B shape for the jobs beside this file, in outputs/h200.

long.jsonl: 16,384 documents of 900 words, longer than the context of the 8B jobs. abstracts.jsonl: 9,856 documents of
60 to 300 words, each beginning with a number of its own, so that no two share more than the instruction. short.jsonl:
8,192 documents of 25 to 100 words. varied.jsonl: 2,000 documents whose lengths are spread as those of a real corpus of
proposals are, 280 to 120,000 characters.
"""

import json
import random
import re
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
_WORDS = [stem + end for stem in _STEMS for end in _ENDS]


# Characters of a real corpus, at its twentieths.
_LENGTHS = [
    281, 2857, 4121, 5404, 6409, 7322, 8265, 9257, 10573, 12214, 13790, 15304, 17525, 19060, 21379, 23885, 27012, 31665,
    39203, 56407, 119156,
]  # fmt: skip


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def varied(rng: random.Random, n: int) -> str:
    """Paragraphs of sentences, as long as the corpus has them."""
    at, rest = divmod(n * 20 / 1999, 1)
    low, high = _LENGTHS[int(at)], _LENGTHS[min(int(at) + 1, 20)]
    wanted = low + rest * (high - low)
    found = f"Document {n}.\n\n"
    while len(found) < wanted:
        found += f"{text(rng, rng.randint(8, 30)).capitalize()}." + rng.choice((" ", " ", " ", " ", "\n\n"))
    return found[: int(wanted)]


def widened(tokenizer: dict) -> dict:
    """With a word for each id of the shape: most that a model without weights writes is beyond the small tokenizer.

    Each is two words of the small one, so texts read again are about as long as they were written.
    """
    ids = tokenizer["model"]["vocab"]
    size = json.loads((HERE / "config.json").read_text())["vocab_size"]
    begins = [word for word in ids if re.fullmatch("Ġ[a-z]{3,6}", word)][:320]
    ends = [word for word in ids if re.fullmatch("[a-z]{3,5}", word)][:320]
    new = (begin + end for begin in begins for end in ends if begin + end not in ids)
    ids.update(zip(new, range(max(ids.values()) + 1, size), strict=False))
    return tokenizer


def main() -> None:
    rng = random.Random(5)
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "long.jsonl").open("w") as lines:
        for n in range(16384):
            lines.write(json.dumps({"id": f"d{n}", "text": f"{n} {text(rng, 900)}"}) + "\n")
    with (OUT / "abstracts.jsonl").open("w") as lines:
        for n in range(9856):
            record = {"id": f"a{n}", "title": f"Abstract {n}", "text": text(rng, rng.randint(60, 300))}
            lines.write(json.dumps(record) + "\n")
    with (OUT / "short.jsonl").open("w") as lines:
        for n in range(8192):
            lines.write(json.dumps({"id": f"s{n}", "text": f"{n} {text(rng, rng.randint(25, 100))}."}) + "\n")
    with (OUT / "varied.jsonl").open("w") as lines:
        for n in rng.sample(range(2000), 2000):
            lines.write(json.dumps({"id": f"v{n}", "text": varied(rng, n)}) + "\n")
    shape = OUT / "llama-3.1-8b-shape"
    shape.mkdir(exist_ok=True)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TOKENIZER / name, shape / name)
    shutil.copy(HERE / "config.json", shape / "config.json")
    (shape / "tokenizer.json").write_text(json.dumps(widened(json.loads((TOKENIZER / "tokenizer.json").read_text()))))


if __name__ == "__main__":
    main()
