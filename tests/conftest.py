import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "contract"), str(HERE / "real")]

MODEL = HERE.parent / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The demo model; `make test` makes it first."""
    if not (MODEL / "config.json").exists():
        pytest.skip("the demo model is not there: make model")
    return MODEL


@pytest.fixture
def out(tmp_path) -> Path:
    """The run directory of the jobs that helpers_run writes."""
    return tmp_path / "out"
