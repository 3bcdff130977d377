"""The names of the files in a run's folder (`output_dir`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run's folder. Making one touches nothing on disk."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    def is_run(self) -> bool:
        """True where a run has already begun here."""
        return self.config.is_file() or self.events.is_file() or self.checkpoints.is_dir()
