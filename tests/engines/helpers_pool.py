"""Engines for the processes of a pool; they import this module, so it imports little."""

import os

from batchgen.engines.fake import FakeEngine
from batchgen.job.config import FakeEngine as Faults
from batchgen.models.tokenizer import BytesTokenizer


def make(faults):
    return FakeEngine(Faults(**faults), BytesTokenizer(), max_num_seqs=4, max_model_len=512, fill_first=False)


def told():
    """An engine that tells of its environment."""
    engine = make({})
    engine.info = type(engine.info)(backend="fake", device=os.environ["BATCHGEN_TEST"])
    return engine
