"""A notifier that Airflow's own processes can import: it appends each alert to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from airflow.sdk import BaseNotifier


class FileNotifier(BaseNotifier):
    template_fields = ("text",)

    def __init__(self, path: str, text: str = "{{ alert.text }}") -> None:
        super().__init__()
        self.path, self.text = path, text

    def notify(self, context: Any) -> None:
        with Path(self.path).open("a") as file:
            file.write(json.dumps(self.text) + "\n")
