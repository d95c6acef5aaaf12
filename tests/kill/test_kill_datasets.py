"""A job over two dozen data sets, killed at random places, loses no row and doubles none."""

import random
from collections import Counter
from pathlib import Path

import pytest
from helpers_datasets import write_corpus
from helpers_kill import killed
from helpers_run import rows, same_rows, start, write_job

# Places, and how far the call is at most that dies: every start reads from the beginning and commits what is left.
PLACES = {
    "batchgen.sources.base:Reader.document@before": 230,
    "batchgen.sources.dataset:_library@after": 60,
    "batchgen.engines.fake:FakeEngine.poll@before": 25,
    "batchgen.storage.checkpoint:Committer.commit@before": 6,
    "batchgen.storage.checkpoint:Committer.commit@after": 6,
    "batchgen.fsio:Path.replace@before": 8,
    "batchgen.fsio:Path.replace@after": 8,
    "batchgen.plan:make@after": 1,
}
KILLS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, monkeypatch_module):
    """The data sets, in a folder that is the working directory, and the rows of a run that nobody disturbed."""
    monkeypatch_module.chdir(tmp_path_factory.mktemp("datasets"))
    corpus = write_corpus()
    corpus.job = write_job(
        Path(), corpus.inputs, checkpoint={"rows": 11}, prompt={"user": "{{ title }}\n{{ text }}\nSummarize this."}
    )
    assert start(corpus.job, "output.dir=undisturbed").exit_status == 0
    corpus.undisturbed = rows(Path("undisturbed"))
    return corpus


def test_each_row_of_each_data_set_is_there_once(corpus):
    found = Counter((row["id_type"], row["id"]) for row in corpus.undisturbed)
    assert found.pop((None, None)) == corpus.without_id
    assert set(found) == corpus.expected
    assert set(found.values()) == {1}
    assert {row["status"] for row in corpus.undisturbed} == {"ok"}
    assert len({row["source"] for row in corpus.undisturbed}) == len(corpus.inputs) >= 20
    assert len({row["summary"] for row in corpus.undisturbed}) == corpus.rows  # each is of its own document


@pytest.mark.parametrize("seed", [None, *(pytest.param(n, marks=pytest.mark.long) for n in range(8))])
def test_killed_at_random_places_no_row_is_lost_or_doubled(corpus, seed):
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    dice = random.Random(seed)
    print(f"seed {seed}")
    out = Path(f"killed-{seed}")
    committed = []
    kills = 0
    for _ in range(KILLS):
        place, most = dice.choice([*PLACES.items()])
        nth = dice.randint(1, most)
        died = killed(place, nth, "--set", f"output.dir={out}")
        print(f"{place} {nth}: {'killed' if died else 'ended before'}")
        kills += died
        now = rows(out)
        assert [row for row in now if row in committed] == committed
        committed = now
    assert kills
    assert start(corpus.job, f"output.dir={out}").exit_status == 0
    now = rows(out)
    assert [row for row in now if row in committed] == committed
    same_rows(now, corpus.undisturbed)
    assert start(corpus.job, f"output.dir={out}").report["attempt"]["requests"] == 0
