import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE / name) for name in ("contract", "kill", "real", "slurm"))]

# Made-up values: `make test-all` tries more of them. A shared machine can stall any example: the time limit of the test
# itself is enough.
settings.register_profile("short", deadline=None, max_examples=40)
settings.register_profile("all", deadline=None, max_examples=300)
settings.load_profile("short")
MODEL = HERE.parent / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The demo model; `make test` makes it first."""
    if not (MODEL / "config.json").exists():
        pytest.skip("the demo model is not there: make model")
    return MODEL


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory) -> None:
    """The lock files of datasets go here, not into the home folder; it reads this when it is first imported."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def out(tmp_path) -> Path:
    """The run directory of the jobs that helpers_run writes."""
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Nothing holds a fake engine's memory: no need to wait between two of them."""
    from batchgen.feeding import feed

    monkeypatch.setattr(feed, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(feed, "_ECHO_S", 0.02)
