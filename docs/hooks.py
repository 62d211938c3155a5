"""What MkDocs runs besides rendering the pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_post_build(config: Any) -> None:
    """Fail if a page of the site loads anything from another host."""
    outside = re.compile(r"(?i)<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:)?//")
    for page in Path(config["site_dir"]).rglob("*.html"):
        found = outside.search(page.read_text(encoding="utf-8"))
        if found:
            raise RuntimeError(f"{page.name} loads from elsewhere: {found.group(0)}")
