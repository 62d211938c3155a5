"""The documentation is true: it builds, its code runs, its commands parse, its tables are whole."""

from __future__ import annotations

import dataclasses
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
from rl_training import cli
from rl_training.config import algo_config_type
from rl_training.experiment import ALGORITHMS, ExperimentManager
from rl_training.tools.zoo.manifest import load_benchmark

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
HAS_MKDOCS = importlib.util.find_spec("material") is not None


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def load_hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load_hooks()


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
    assert "<!-- knobs" not in ppo
    assert "gae_lambda" in ppo
    assert "ppo/cartpole" in ppo


def test_an_unknown_comment_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing is made of <!-- knobs: pop -->"):
        hooks.fill("<!-- knobs: pop -->")


# -- tables that are made ----------------------------------------------------------------------


@pytest.mark.parametrize("heading", hooks.config_types())
def test_the_reference_holds_every_field(heading: str) -> None:
    kind = hooks.config_types()[heading]
    reference = hooks.config_reference()
    section = reference.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    fields = [field.name for field in dataclasses.fields(kind)]
    assert [row.split("`")[1] for row in rows] == fields
    assert all(row.rstrip(" |").rpartition("| ")[2] for row in rows), "a field without a meaning"


def test_a_default_is_shown_as_yaml_has_it() -> None:
    table = hooks.table_of_fields(algo_config_type("ppo"))
    assert "| `learning_rate` | `0.00025` | `float` | Step size of the optimizer at" in table
    assert "| `target_kl` | `unset` | `float or unset` |" in table
    assert "| `anneal_lr` | `true` | `bool` |" in table
    recurrent = hooks.table_of_fields(algo_config_type("recurrent_ppo"))
    assert "Widths of the layers after each LSTM" in recurrent  # the subclass has the last word


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_algorithm_has_a_page_with_its_tables(algo: str) -> None:
    text = (DOCS / "algorithms" / f"{algo}.md").read_text(encoding="utf-8")
    assert f"\n<!-- knobs: {algo} -->\n" in text
    assert f"\n<!-- results: {algo} -->\n" in text
    for part in ("Idea", "Hyperparameters", "Logged", "Details", "Results"):
        assert f"\n## {part}\n" in text
    filled = hooks.fill(text)
    for field in dataclasses.fields(algo_config_type(algo)):
        assert f"| `{field.name}` |" in filled
    for preset in (ROOT / "configs" / algo).glob("*.yaml"):
        row = next(line for line in filled.splitlines() if f"`{algo}/{preset.stem}`" in line)
        partial = "\npartial:" in preset.read_text(encoding="utf-8")
        assert ("**partial:**" in row) == partial


def test_the_readme_holds_the_results_that_are_kept() -> None:
    assert hooks.table_of_tasks() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_benchmark_is_shown_whole() -> None:
    table = hooks.table_of_benchmark("classic")
    for entry in load_benchmark("classic").entries:
        assert f"| `{entry.preset}` |" in table
    (row,) = (line for line in table.splitlines() if "`ppo_pendulum` |" in line)
    assert re.search(r"\| -172.0 \| (reached|[\d.]+ below) \|", row)
    assert re.search(r"- rl-baselines3-zoo, benchmark.md \(100k steps\): .*`ppo_pendulum`", table)
    with pytest.raises(ValueError, match="no results of atari"):
        hooks.table_of_benchmark("atari")


def logged(path: Path) -> set[str]:
    """The metrics that the tables of a page name."""
    return set(re.findall(r"(?m)^\| `(\w+/\w+)` \|", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_metrics_of_a_page_are_those_of_a_run(
    algo: str, make_config: conftest.MakeConfig
) -> None:
    config = make_config(algo=algo, total_timesteps=1024)
    result = ExperimentManager.setup(config).train()
    lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = {key for line in lines for key in json.loads(line)} - {"format", "step"}
    common = logged(DOCS / "algorithms" / "index.md")
    own = logged(DOCS / "algorithms" / f"{algo}.md")
    assert common
    assert not own & common
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
        for words in re.findall(r"`(rl-training [^`]*)`", hooks.table_of_results(algo)):
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
    table = hooks.table_of_commands()
    assert all(f"`rl-training {name}" in table for name in cli._COMMANDS)


def test_make_knows_what_it_is_asked() -> None:
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    texts += [hooks.table_of_results(algo) for algo in ALGORITHMS]
    asked = {word for text in texts for word in re.findall(r"`make ([a-z-]+)`", text)}
    assert asked
    assert asked <= set(targets)


# -- links and figures -------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    text = hooks.fill(path.read_text(encoding="utf-8"))
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


@pytest.mark.parametrize("page", ["performance.md", "comparison.md"])
def test_speeds_stand_in_the_readme(page: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = without_code(DOCS / page)
    speeds = re.findall(r"\b\d+\.\d(?= times| and \d\.\d times)|\b\d,\d{3}\b|\b\d+%", text)
    assert speeds
    for speed in speeds:
        assert speed in readme, f"{page} says {speed}"


def test_files_that_pages_name_are_there() -> None:
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:examples|benchmarks|scripts)/[\w/]+\.py)`", text):
            assert (ROOT / name).is_file(), f"{named(page)} names {name}"
        inside = r"`((?:algorithms|data|models|runtime|contrib|envs)/\w+(?:\.py|/))`"
        for name in re.findall(inside, text):
            assert (ROOT / "src" / "rl_training" / name).exists(), f"{named(page)} names {name}"
