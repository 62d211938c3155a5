"""Upload shared folders to Hugging Face, and download them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_training.errors import ConfigError, UserError
from rl_training.runs import new_folder
from rl_training.shared_folder import (
    CARD,
    FILES,
    MAX_TEXT,
    MAX_WEIGHTS,
    WEIGHTS,
    open_shared,
    require_free,
)

_CLIENTS_FILES = "download"
"""Where the client of Hugging Face keeps its own files meanwhile."""


def check_repository(name: str) -> None:
    """Raise ConfigError unless a name has the form USER/REPO."""
    user, _, repository = name.partition("/")
    if not user or not repository or "/" in repository:
        raise ConfigError(f"{name!r} is no repository on Hugging Face: write USER/REPO")


def require_hub() -> None:
    """Raise ConfigError where huggingface_hub is not installed."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Hugging Face needs the extra 'share'; in the clone: pip install '.[share]'"
        ) from None


def require_token() -> None:
    """Raise UserError where nobody is logged in to Hugging Face on this machine."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise UserError(
            "there is no token to upload to Hugging Face with: run 'hf auth login', or set HF_TOKEN"
            " to one with write access (https://huggingface.co/settings/tokens)"
        )


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload a shared folder to a repository, made where it is missing; return its address."""
    from huggingface_hub import HfApi

    with _explained(f"{folder} was not uploaded to {repository}"):
        api = HfApi()
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(FILES),
            commit_message="Share a policy of rl_training",
        )
    return str(address)


def fetch(repository: str, folder: Path, revision: str | None = None) -> str:
    """Download a shared policy to a new folder; return the commit that it is of.

    Only the files of a shared policy are downloaded, and only up to their limits. Nothing in them
    is imported or executed.
    """
    from huggingface_hub import HfApi

    require_free(folder)
    api = HfApi()
    with _explained(f"{repository} was not downloaded"):
        info = api.model_info(repository, revision=revision, files_metadata=True)
    sizes = {one.rfilename: one.size for one in info.siblings or ()}
    if missing := set(FILES) - {CARD} - set(sizes):
        raise UserError(
            f"{repository} holds no policy of rl_training: it lacks {', '.join(sorted(missing))}"
        )
    commit = str(info.sha)
    with new_folder(folder) as hidden:
        for name in FILES:
            if name in sizes:
                _require_size(repository, name, sizes[name])
                with _explained(f"{repository} was not downloaded"):
                    found = api.hf_hub_download(
                        repository, name, revision=commit, local_dir=hidden / _CLIENTS_FILES
                    )
                Path(found).rename(hidden / name)
        shutil.rmtree(hidden / _CLIENTS_FILES)
        with open_shared(hidden / WEIGHTS) as shared:
            shared.with_weights()  # raises where they are damaged
    return commit


def _require_size(repository: str, name: str, size: Any) -> None:
    most = MAX_WEIGHTS if name == WEIGHTS else MAX_TEXT
    if type(size) is not int or size > most:
        raise UserError(
            f"{repository}: {name} has {size if size is None else format(size, ',')} bytes, more"
            f" than the {most:,} that are downloaded"
        )


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise UserError for what the Hugging Face client raises, of whichever HTTP library."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        detail = " ".join(str(error).split())[:300]
        raise UserError(f"{what}: {detail or kind} ({kind})") from error
