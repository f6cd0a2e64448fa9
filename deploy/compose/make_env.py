"""Write `.env` for Docker Compose, with a random secret for each thing that has one.

    python3 deploy/compose/make_env.py [endpoint|kubernetes]

The word says where shards are answered; `endpoint` by default. An `.env` that is there keeps its secrets, since
databases and volumes were made with them: only what it lacks is added, and the profile is changed to the one asked for.
Needs Python's standard library only.
"""

from __future__ import annotations

import base64
import os
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = {"endpoint": "local", "kubernetes": "kubernetes"}


def fernet_key() -> str:
    return base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()


# Values go into URLs and JSON as they are, so they are letters, digits, `-` and `_` (a Fernet key ends with `=`).
SECRETS = {
    "POSTGRES_PASSWORD": lambda: secrets.token_urlsafe(24),
    "AIRFLOW_ADMIN_PASSWORD": lambda: secrets.token_urlsafe(12),
    "AIRFLOW_FERNET_KEY": fernet_key,
    "AIRFLOW_API_SECRET_KEY": lambda: secrets.token_urlsafe(32),
    # Signed with HS512, which wants 64 bytes.
    "AIRFLOW_JWT_SECRET": lambda: secrets.token_urlsafe(64),
    "S3_ACCESS_KEY": lambda: secrets.token_hex(10),
    "S3_SECRET_KEY": lambda: secrets.token_urlsafe(30),
    "ENDPOINT_KEY": lambda: secrets.token_urlsafe(24),
    "K3S_TOKEN": lambda: secrets.token_urlsafe(24),
}


def filled(text: str, profile: str) -> str:
    """`.env` text with every empty secret filled in and the profile set; comments and everything else stay."""
    chosen = {"COMPOSE_PROFILES": profile, "MILLRACE_BACKEND": BACKENDS[profile]}
    lines, seen = [], set()
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        seen.add(name)
        if separator and name in chosen:
            line = f"{name}={chosen[name]}"
        elif separator and name in SECRETS and not value.strip():
            line = f"{name}={SECRETS[name]()}"
        lines.append(line)
    lines += [f"{name}={make()}" for name, make in SECRETS.items() if name not in seen]
    lines += [f"{name}={value}" for name, value in chosen.items() if name not in seen]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    profile = arguments[0] if arguments else "endpoint"
    if profile not in BACKENDS or len(arguments) > 1:
        print(f"'{' '.join(arguments)}' is not one of {', '.join(BACKENDS)}.")
        return 2
    file = ROOT / ".env"
    source = file if file.exists() else ROOT / ".env.example"
    partial = file.with_name(".env.partial")
    partial.touch(mode=0o600)
    partial.write_text(filled(source.read_text(), profile))
    os.replace(partial, file)
    print(f"{file.name} is ready for profile '{profile}'. It holds secrets: keep it on this machine.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
