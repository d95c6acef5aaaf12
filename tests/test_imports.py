"""Imports point one way, as docs/design.md draws it, and the heavy ones come late."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "batchgen"

# From the top: a module imports from its own layer and from those below it. What is not named here is a part of the
# line: sources, prompts, tokenizer, workflows, engines, sinks, checkpoint and what these share.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"bench"},
    {"executors"},
    {"pipeline"},
    {"feeding"},
    {"PARTS"},
    {"job", "fsio", "text"},
    {"data", "errors"},
]
# The seams and the folders beside them: what each may use of the project besides itself.
SEAMS = {
    "sources": {"job", "data", "errors", "text"},
    "sinks": {"data", "errors", "fsio"},
    "workflows": {"data", "errors", "text"},
    "engines": {"data", "errors", "fsio", "job", "lifecycle", "models", "text"},
    "prompting": {"data", "errors", "job", "models", "text"},
    "models": {"errors", "fsio", "job"},
    "job": {"errors", "text"},
}
# The same within a folder: what one file may use of all of the project.
FILES_USE = {
    "prompting.long_prompts": {
        "job.config",
        "data",
        "prompting.splitter",
        "text",
        "models.tokenizer",
        "prompting.turns",
    },
    "prompting.shorten": {"prompting.splitter"},
    "prompting.splitter": set(),
    "prompting.turns": {"data"},
    "models.tokenizer": {"errors", "models.plain_text"},
    "models.plain_text": set(),
    "models.model": {"errors", "models.hub"},
    "models.adapter": {"errors", "models.hub"},
    "models.hub": {"errors"},
    "job.config": {"errors", "job.values"},
}
# Outside packages that one kind of module alone imports.
ONLY_IN = {
    "vllm": ("engines/vllm", "bench/peers/"),
    "torch": ("engines/vllm", "models/demo_model", "bench/peers/transformers_batches"),
    "transformers": ("models/tokenizer", "models/demo_model", "bench/peers/transformers_batches"),
    "ray": ("executors/", "bench/peers/ray_data"),
    "datatrove": ("bench/peers/datatrove",),
}


def name_of(path: Path) -> str:
    """`sources.jsonl` for a file of the package; a package's own file has the package's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path, *, top_only: bool = False) -> list[str]:
    """Full dotted names of everything a file imports, wherever the import stands."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def own(path: Path, **options) -> set[str]:
    """Modules of the project a file imports; `__version__` and the like of the package itself are none."""
    found = set()
    for name in imports(path, **options):
        if name.split(".")[0] != "batchgen":
            continue
        parts = name.split(".")[1:]
        while parts and ".".join(parts) not in FILES:
            parts.pop()
        if parts:
            found.add(".".join(parts))
    return found


def layer(name: str) -> int:
    first = name.partition(".")[0]
    return next((n for n, names in enumerate(LAYERS) if first in names), LAYERS.index({"PARTS"}))


def test_the_files_are_found():
    assert {"cli", "pipeline", "sources.jsonl", "engines.vllm", "executors.local", "workflows.single"} <= set(FILES)
    assert "sources.base" in own(FILES["sources.jsonl"])
    assert "fsio" in own(FILES["reporting.report"])
    assert {name.split(".")[0] for name in FILES} >= {name for names in LAYERS for name in names} - {"PARTS"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_point_down(name):
    up = {other for other in own(FILES[name]) if layer(other) < layer(name)}
    assert not up


@pytest.mark.parametrize("name", ["data", "errors"])
def test_the_lowest_modules_import_nothing_of_the_project(name):
    assert own(FILES[name]) == set()


@pytest.mark.parametrize("seam", sorted(SEAMS))
def test_a_seam_uses_what_it_is_drawn_with(seam):
    files = {name: path for name, path in FILES.items() if name.split(".")[0] == seam}
    assert files
    for name, path in files.items():
        used = {other.split(".")[0] for other in own(path)} - {seam}
        assert used <= SEAMS[seam], name


@pytest.mark.parametrize("name", sorted(FILES_USE))
def test_a_file_uses_what_it_is_drawn_with(name):
    assert own(FILES[name]) <= FILES_USE[name]


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_a_heavy_package_is_imported_in_one_place(package):
    for path in FILES.values():
        if any(name.split(".")[0] == package for name in imports(path)):
            at = path.relative_to(PACKAGE).as_posix()
            assert at.startswith(ONLY_IN[package]), at


@pytest.mark.parametrize("package", ["vllm", "torch", "transformers", "datasets", "ray", "datatrove"])
def test_no_heavy_package_is_imported_on_loading(package):
    for name, path in FILES.items():
        assert package not in {one.split(".")[0] for one in imports(path, top_only=True)}, name


def test_no_module_imports_itself_by_a_detour():
    graph = {name: own(path) for name, path in FILES.items()}

    def below(name, on_the_way):
        for other in graph[name]:
            assert other not in on_the_way, " → ".join([*on_the_way, other])
            below(other, [*on_the_way, other])

    for name in graph:
        below(name, [name])


def loaded_by(*words: str) -> set[str]:
    """Top-level names of all modules that a command line has loaded when it ends."""
    code = (
        "import sys\n"
        f"sys.argv = ['batchgen', *{list(words)!r}]\n"
        "from batchgen.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as e:\n    assert not e.code, e.code\n"
        "print('MODULES', *{name.split('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


HEAVY = {"pyarrow", "pydantic", "numpy", "vllm", "torch", "transformers", "datasets", "tqdm", "jinja2", "psutil"}


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("run", "--help"), ("validate", "--help")], ids=" ".join
)
def test_help_loads_nothing_heavy(words):
    loaded = loaded_by(*words)
    assert "click" in loaded
    assert not loaded & HEAVY
