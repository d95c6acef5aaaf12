"""Hands scripts to Slurm."""

import re
import subprocess

from batchgen.errors import ConfigError

_PATIENCE_S = 120


def submit(script: str, *options: str) -> str:
    """The number of the job that sbatch has made of the script. Raises ConfigError with what sbatch says."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options], input=script, capture_output=True, text=True, timeout=_PATIENCE_S,
            check=False,
        )  # fmt: skip
    except FileNotFoundError as e:
        raise ConfigError(
            "--submit: there is no sbatch here; leave --submit out, and take the script to where there is"
        ) from e
    except subprocess.TimeoutExpired as e:
        raise ConfigError(f"--submit: sbatch has not answered in {_PATIENCE_S} s; squeue tells what there is") from e
    found = re.match(r"\d+", done.stdout)  # `123`, or `123;cluster`
    if done.returncode or found is None:
        said = (done.stderr or done.stdout).strip() or f"it ended with {done.returncode}"
        raise ConfigError(f"--submit: sbatch refuses: {said}")
    return found[0]
