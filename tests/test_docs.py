"""The documentation is true: it builds, its code runs, its commands parse, its tables are whole."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tyro

import conftest
import rl_training
from rl_training import cli
from rl_training._internal.coerce import hidden_fields
from rl_training.config import algo_config_type
from rl_training.experiment import ALGORITHMS, ExperimentManager
from rl_training.tools.zoo.manifest import load_benchmark
from rl_training.tools.zoo.names import train_name
from rl_training.tools.zoo.results import kept_results

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
HAS_MKDOCS = importlib.util.find_spec("material") is not None


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def load_generator() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return importlib.import_module("generate_docs")


generator = load_generator()
tables, api = generator.docs_tables, generator.docs_api


class Block(NamedTuple):
    """A fenced block, or an indented one (without a language)."""

    language: str
    options: str
    text: str


def blocks(path: Path) -> Iterator[Block]:
    """All blocks of code of a page."""
    fence: tuple[str, str] | None = None
    body: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if fence is not None:
            if line.strip() == "```":
                yield Block(*fence, "\n".join(body) + "\n")
                fence, body = None, []
            else:
                body.append(line)
        elif line.startswith("```"):
            language, _, options = line[3:].strip().partition(" ")
            fence = (language, options)
        elif line.startswith("    "):
            yield Block("", "", line[4:] + "\n")
    assert fence is None, f"{path} leaves a block open"


def without_blocks(text: str) -> str:
    return re.sub(r"(?ms)^```.*?^```$", "", text)


def without_code(path: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", without_blocks(path.read_text(encoding="utf-8")))


# -- the site ----------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_MKDOCS, reason="needs pip install 'rl_training[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = [page.relative_to(tmp_path / "site") for page in (tmp_path / "site").rglob("*.html")]
    assert len(pages) >= len(list(DOCS.rglob("*.md")))
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in home
    ppo = (tmp_path / "site" / "algorithms" / "ppo.html").read_text(encoding="utf-8")
    assert "gae_lambda" in ppo
    assert "ppo/cartpole" in ppo


# -- tables that are made ----------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generator.filled(text) == text, f"{named(page)} is out of date: run make docs-tables"


def test_an_outdated_page_is_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- begin support -->\nold\n<!-- end -->\n\nafter\n")
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(generator, "PAGES", [page])
    assert generator.main(["--check"]) == 1
    assert capsys.readouterr().err == "out of date: page.md; run: make docs-tables\n"
    assert generator.main([]) == 0
    text = page.read_text()
    assert text.startswith("before\n\n<!-- begin support -->\n\n| algorithm |")
    assert text.endswith("|\n\n<!-- end -->\n\nafter\n")
    assert generator.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- begin knobs: pop -->\n<!-- end -->", "nothing is generated for"),
        ("<!-- begin support -->", "'<!-- begin support -->' is not a marker with an end"),
        ("<!-- support -->", "'<!-- support -->' is not a marker with an end"),
    ],
)
def test_a_wrong_marker_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generator.filled(text)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "zoo" / "README.md"], ids=named)
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    """On the code host a bar ends a cell even within code."""
    cells = 0
    for line in without_blocks(page.read_text(encoding="utf-8")).splitlines():
        if not line.startswith("|"):
            cells = 0
            continue
        found = len(re.split(r"(?<!\\)\|", line.strip())) - 2
        cells = cells or found
        assert found == cells, line


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in set(rl_training.__all__) - {"__version__"}:
        assert f"`{name}`" in page or f"### {name}\n" in page, name
    for path in PAGES:
        for block in blocks(path):
            for names in re.findall(r"from rl_training import (.*)", block.text):
                assert set(names.split(", ")) <= set(rl_training.__all__)
    for member in ("learn", "predict", "act", "evaluate", "save", "load", "policy", "run_dir"):
        assert f"\n#### {member}\n" in page


def test_docstrings_become_markdown() -> None:
    docstring = """Return ``x``, see :func:`y`.

    Args:
        a: the first
            of two.
        b: the second.

    Raises:
        ValueError: always.
    """
    assert api.prose(docstring) == (
        "Return `x`, see `y`.\n\n**Args:**\n\n- `a`: the first of two.\n- `b`: the second.\n\n"
        "**Raises:**\n\n- `ValueError`: always."
    )


@pytest.mark.parametrize("heading", tables.config_types())
def test_the_reference_holds_every_field(heading: str) -> None:
    kind = tables.config_types()[heading]
    reference = tables.config_reference()
    section = reference.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    hidden = hidden_fields(kind)
    fields = [field.name for field in dataclasses.fields(kind) if field.name not in hidden]
    assert [row.split("`")[1] for row in rows] == fields
    assert all(row.rstrip(" |").rpartition("| ")[2] for row in rows), "a field without a meaning"


def test_a_default_is_shown_as_yaml_has_it() -> None:
    table = tables.table_of_fields(algo_config_type("ppo"))
    assert "| `learning_rate` | `0.00025` | `float` | Step size of the optimizer at" in table
    assert "| `target_kl` | `unset` | `float or unset` |" in table
    assert "| `anneal_lr` | `true` | `bool` |" in table
    recurrent = tables.table_of_fields(algo_config_type("recurrent_ppo"))
    assert "Widths of the layers after each LSTM" in recurrent  # the subclass has the last word


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_algorithm_has_a_page_with_its_tables(algo: str) -> None:
    text = (DOCS / "algorithms" / f"{algo}.md").read_text(encoding="utf-8")
    assert f"\n<!-- begin knobs: {algo} -->\n" in text
    assert f"\n<!-- begin results: {algo} -->\n" in text
    for part in ("Idea", "Hyperparameters", "Logged", "Details", "Results"):
        assert f"\n## {part}\n" in text
    kind = algo_config_type(algo)
    for field in dataclasses.fields(kind):
        assert (f"| `{field.name}` |" in text) == (field.name not in hidden_fields(kind))
    for preset in (ROOT / "configs" / algo).glob("*.yaml"):
        row = next(line for line in text.splitlines() if f"`{algo}/{preset.stem}`" in line)
        partial = "\npartial:" in preset.read_text(encoding="utf-8")
        assert ("**partial:**" in row) == partial


def test_the_readme_is_short_and_shows_what_a_user_gets() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    assert tables.table_of_tasks() in text
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert (ROOT / picture).stat().st_size < 300 * 1024
    order = [picture, "```python", "| task |", "## Install", "## Documentation"]
    assert sorted(order, key=text.index) == order


def test_a_benchmark_is_shown_whole() -> None:
    table = tables.table_of_benchmark("classic")
    benchmark = load_benchmark("classic")
    results = kept_results(benchmark)
    assert results is not None
    for entry in benchmark.entries:
        shown = f"| `{train_name(benchmark, entry)}` |" in table
        assert shown == (results.of(entry.preset) is not None)
    (row,) = (line for line in table.splitlines() if "| `ppo/pendulum` |" in line)
    assert re.search(r"\| -172.0 \| (reached|[\d.]+ below) \|", row)
    assert re.search(r"- rl-baselines3-zoo, benchmark.md \(100k steps\): .*`ppo/pendulum`", table)
    with pytest.raises(ValueError, match="no results of atari"):
        tables.table_of_benchmark("atari")


def logged(path: Path) -> set[str]:
    """The metrics that the tables of a page name."""
    text = re.sub(r"(?s)<!-- begin .*?<!-- end -->", "", path.read_text(encoding="utf-8"))
    return set(re.findall(r"(?m)^\| `(\w+/\w+)` \|", text))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_metrics_of_a_page_are_those_of_a_run(
    algo: str, make_config: conftest.MakeConfig
) -> None:
    entry = ALGORITHMS[algo]
    env_ids = [conftest.any_env(algo)]
    if entry.offline and len(entry.actions) > 1:  # its metrics depend on the kind of actions
        env_ids = ["CartPole-v1", "Pendulum-v1"]
    found: set[str] = set()
    for env_id in env_ids:
        steps = 64 if entry.offline else 1024
        config = make_config(algo=algo, env_id=env_id, total_timesteps=steps)
        result = ExperimentManager.setup(config).train()
        lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found |= {key for line in lines for key in json.loads(line)} - {"format", "step"}
    if entry.multi_agent:  # named after the agents
        found = {key for key in found if "/return_agent_" not in key}
    common = logged(DOCS / "algorithms" / "index.md")
    own = logged(DOCS / "algorithms" / f"{algo}.md")
    assert common
    assert not own & common
    if entry.offline:  # it counts updates, and plays no episodes of training
        common = {name for name in common if not name.startswith("rollout/")}
        common ^= {"time/steps_per_second", "time/updates_per_second"}
    assert own | common == found


# -- code and commands -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [path for path in PAGES if any(b.language == "python" for b in blocks(path))],
    ids=named,
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """In order, in one namespace; a block with a title is that file."""
    parts = []
    for block in blocks(page):
        if block.language != "python":
            continue
        title = re.search(r'title="([\w.]+)"', block.options)
        if title:
            (tmp_path / title.group(1)).write_text(block.text, encoding="utf-8")
        else:
            parts.append(block.text)
    script = tmp_path / "page.py"
    script.write_text("\n".join(parts), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Parsed(BaseException):
    """The parser took it: nothing is run."""


def commands() -> Iterator[tuple[str, str]]:
    """Every line that calls rl-training, and its page."""
    for path in [*PAGES, ROOT / "zoo" / "README.md"]:
        for block in blocks(path):
            if block.language not in ("", "sh", "console", "bash"):
                continue
            for line in block.text.splitlines():
                words = line.removeprefix("$ ").strip()
                if words.startswith("rl-training "):
                    yield named(path), words
    for algo in ALGORITHMS:
        for words in re.findall(r"`(rl-training [^`]*)`", tables.table_of_results(algo)):
            yield f"results of {algo}", words.replace("--seed S", "--seed 1")


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_a_command_is_understood(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real parser, which builds and checks the whole config."""
    understands = tyro.cli

    def only_parse(*args: Any, **kwargs: Any) -> None:
        understands(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(tyro, "cli", only_parse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("preset: ppo/cartpole\n", encoding="utf-8")
    words = shlex.split(line, comments=True)[1:]
    try:
        code = cli.main(words)
    except Parsed:
        return
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert words[-1] == "--help" or words[:1] == ["--help"], f"{page}: {line} exits with {code}"
    assert code == 0


def test_every_command_is_shown() -> None:
    shown = {words.split()[1] for _, words in commands()}
    assert set(cli._COMMANDS) <= shown
    table = tables.table_of_commands()
    assert all(f"`rl-training {name}" in table for name in cli._COMMANDS)


def test_the_json_of_every_command_is_described() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    rows = text.partition("| command | keys |")[2].partition("\n\n")[0].splitlines()
    described = {
        name.split()[0] for row in rows[2:] for name in re.findall(r"`([a-z0-9 -]+)`", row[:40])
    }
    assert set(cli._COMMANDS) <= described


def test_make_knows_what_it_is_asked() -> None:
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    texts += [tables.table_of_results(algo) for algo in ALGORITHMS]
    asked = {word for text in texts for word in re.findall(r"`make ([a-z-]+)`", text)}
    assert asked
    assert asked <= set(targets)


# -- links and figures -------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"(?m)^#+ (.*)$", without_blocks(text))
    cleaned = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in cleaned}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{named(page)} links to {target}"
        if page.is_relative_to(DOCS):
            assert there.is_relative_to(DOCS), f"{named(page)} links out of the site: {target}"
        if anchor:
            assert anchor in anchors(there), f"{named(page)} links to {target}"


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "comparison.md"], ids=named)
def test_speeds_are_those_of_the_performance_page(page: Path) -> None:
    measured = (DOCS / "performance.md").read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    start = text.index("peed** relative" if page.parent == DOCS else "Speed relative")
    speeds = re.findall(r"\b\d\.\d\b", text[start:].partition("\n\n")[0].partition("CleanRL")[0])
    assert len(speeds) >= 6
    for speed in speeds:
        assert f"{speed}x" in measured, f"{named(page)} has {speed}"


def test_files_that_pages_name_are_there() -> None:
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:examples|benchmarks|scripts)/[\w/]+\.py)`", text):
            assert (ROOT / name).is_file(), f"{named(page)} names {name}"
        inside = r"`((?:algorithms|data|models|runtime|contrib|envs)/\w+(?:\.py|/))`"
        for name in re.findall(inside, text):
            assert (ROOT / "src" / "rl_training" / name).exists(), f"{named(page)} names {name}"
