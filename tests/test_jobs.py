"""Every job under jobs/ is one that a user can copy: it loads, vLLM knows its arguments, and it runs to its end."""

import os
from pathlib import Path

import pytest
from helpers_lora import write_adapter
from helpers_run import SENTENCE, command, rows, start, write_jsonl

from batchgen.engines import vllm_names
from batchgen.errors import ConfigError
from batchgen.executors.checking import check
from batchgen.job import config, jobfile
from batchgen.prompting.prompts import check_templates

TOP = Path(__file__).parent.parent
JOBS = sorted((TOP / "jobs").glob("*.yaml"))
ON_THE_HUB = [path for path in JOBS if path.name != "summarize.yaml"]
names = pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)


def nested(field: str, value) -> dict:
    """`a.b` as a record has it."""
    first, _, rest = field.partition(".")
    return {first: nested(rest, value) if rest else value}


def documents(folder: Path, job: config.Job, count: int) -> list[str]:
    """Files that each input of the job can read, with `count` documents each; the sets that name them."""
    sets = []
    for n, item in enumerate(job.input):
        records = []
        for i in range(count):
            record = {field: f"{field} {i}" for field in item.keep}
            record |= nested(item.id_field, f"{n}-{i}") | nested(item.text_field, SENTENCE.format(n=i))
            records.append(record)
        sets.append(f"input.{n}.path={write_jsonl(folder / f'{n}.jsonl', records)}")
    return sets


def test_the_examples_are_there_and_the_readme_names_them():
    assert {path.stem for path in JOBS} >= {
        "summarize", "llama-3.1-8b-fp8-h200", "throughput-7b", "lora", "awq", "gated-offline",
    }  # fmt: skip
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in JOBS if f"jobs/{path.name}" not in readme] == []


@names
def test_a_job_loads_and_its_names_are_known(path):
    file = jobfile.load(path)
    check_templates(file.job, file.origin)
    vllm_names.check(file)
    assert file.job.name == path.stem
    assert file.job.output.dir == f"outputs/{path.stem}"
    assert all(not item.path.startswith(("/", "~", "..")) for item in file.job.input)


@names
def test_a_job_runs_to_its_end_on_the_fake_engine(path, tmp_path):
    job = jobfile.load(path).job
    sets = [*documents(tmp_path, job, 5), "engine.backend=fake", "engine.args.model=null"]
    if job.engine.adapter is not None:
        sets.append(f"engine.adapter={write_adapter(tmp_path / 'adapter')}")
    outcome = start(path, *sets, f"output.dir={tmp_path / 'out'}")
    assert outcome.exit_status == 0
    assert [row["status"] for row in rows(tmp_path / "out")] == ["ok"] * 5 * len(job.input)


@pytest.mark.parametrize("path", ON_THE_HUB, ids=lambda path: path.stem)
def test_a_job_whose_model_is_not_there_says_so_and_no_more(path, tmp_path):
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    env = {name: value for name, value in env.items() if name != "HF_HUB_CACHE"}
    done = command("validate", path, env=env)
    model = jobfile.load(path).job.engine.args["model"]
    assert (done.returncode, done.stderr) == (78, "")
    (line,) = [line for line in done.stdout.partition("faults:")[2].splitlines() if "engine.args.model: " in line]
    assert f"engine.args.model: {model}: no such folder (working directory {Path.cwd()}), nothing in the local" in line
    assert line.endswith(f"run: hf download {model}")


def test_the_adapter_of_the_example_is_told_when_it_is_not_there(tmp_path):
    file = jobfile.load(TOP / "jobs" / "lora.yaml", ["engine.backend=fake", "engine.args.model=null"])
    with pytest.raises(ConfigError, match=r"^engine\.adapter: adapters/\S+: no such folder"):
        check(file)


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
@pytest.mark.xdist_group("engine")
def test_vllm_takes_the_values():
    """By vLLM's own reading of a command line, which knows types and choices; no engine starts."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())

    def takes(args, sampling):
        pairs = [["--" + key, *([] if value is True else [str(value)])] for key, value in args.items()]
        try:
            assert parser.parse_args([word for pair in pairs for word in pair]).quantization in (
                None,
                *QUANTIZATION_METHODS,
            )
            SamplingParams(**sampling)
        except (Exception, SystemExit):  # noqa: BLE001  vLLM refuses in many ways
            return False
        return True

    for args, sampling in (({"max_num_seqs": "many"}, {}), ({"quantization": "fp9"}, {}), ({}, {"top_p": 7})):
        assert not takes(args, sampling)
    for job in [jobfile.load(path).job for path in JOBS]:
        assert takes(job.engine.args, job.sampling.model_dump()), job.name
