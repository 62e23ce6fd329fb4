"""Build the README that package indexes show: its links and its picture lead to the repository, not to the index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# The text of a link or of a picture, and its target, where that is a file of ours.
LINK = re.compile(r"(?P<text>(?P<picture>!?)\[[^\]]*\]\()(?P<target>(?!https?:|#)[^)]+)\)")


class Readme(MetadataHookInterface):
    """Fills the dynamic field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = metadata["urls"]["Repository"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, repository)}


def absolute(text: str, repository: str) -> str:
    """Return the text with the addresses of the repository in place of paths."""

    def lead(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['text']}{repository}/{kind}/main/{link['target']})"

    return LINK.sub(lead, text)
