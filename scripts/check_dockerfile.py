"""Run the steps of the Dockerfile without a container runtime: each stage in a copy of a root folder, with chroot. Needs root.

    python scripts/check_dockerfile.py ROOT --model deit_tiny.fqvit --image cat.jpg [--work /tmp/stages]

ROOT: a folder with the files of the image python:3.12-slim, such as a Debian made by debootstrap with Python in /usr/local.
The last stage starts the server as its user, runs the health check, sends one image to /v1/classify and stops the server.
Supports the instructions of our Dockerfile only: ARG, FROM, RUN, WORKDIR, COPY, USER, EXPOSE, HEALTHCHECK and CMD.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile as pairs of a keyword and its arguments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


class Stages:
    """The folders of the stages, and the state of the current one."""

    def __init__(self, base: Path, work: Path, arguments: dict[str, str]) -> None:
        self.base, self.work, self.arguments = base, work, arguments
        self.folders: dict[str, Path] = {}
        self.folder = self.cwd = base
        self.user = "0"
        self.health: list[str] = []
        self.command: list[str] = []

    def run(self, words: list[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a command inside the current stage, as its user and in its working folder."""
        inside = ["chroot", f"--userspec={self.user}:{self.user}", str(self.folder), "sh", "-c", 'cd "$0" && exec "$@"']
        path = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root" if self.user == "0" else "/"}
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        return subprocess.Popen([*inside, str(self.cwd), *words], env={**kept, **path}, **options)  # type: ignore[call-overload]

    def check(self, words: list[str]) -> None:
        if self.run(words).wait() != 0:
            sys.exit(f"{' '.join(words)}: failed")

    def step(self, word: str, rest: str) -> None:
        """Execute one instruction."""
        print(f"{word} {rest}", flush=True)
        rest = re.sub(r"\$\{(\w+)\}", lambda found: self.arguments[found[1]], rest)
        match word:
            case "ARG":
                name, _, default = rest.partition("=")
                if self.arguments.setdefault(name, default) == "":
                    sys.exit(f"{name}: no value. Pass it to this script.")
            case "FROM":
                name = rest.partition(" AS ")[2] or "final"
                self.folder, self.user, self.cwd = self.work / name, "0", Path("/")
                shutil.rmtree(self.folder, ignore_errors=True)
                subprocess.run(["cp", "-a", self.base, self.folder], check=True)
                self.folders[name] = self.folder
            case "RUN":
                self.check(["/bin/sh", "-c", rest])
            case "WORKDIR":
                self.cwd = Path(rest)
                self.inside(rest).mkdir(parents=True, exist_ok=True)
            case "COPY":
                self.copy(rest)
            case "USER":
                self.user = rest
            case "HEALTHCHECK":
                self.health = json.loads(rest[rest.index("CMD ") + 4 :])
            case "CMD":
                self.command = json.loads(rest)
            case "EXPOSE":
                pass
            case _:
                sys.exit(f"{word}: not supported by this script.")

    def inside(self, path: str) -> Path:
        return self.folder / str(self.cwd / path).lstrip("/")

    def copy(self, rest: str) -> None:
        *options, sources = re.fullmatch(r"(?:--from=(\w+) )?(.*)", rest).groups()  # type: ignore[union-attr]
        *names, to = sources.split()
        source = self.folders[options[0]] if options[0] else REPOSITORY
        target = self.inside(to)
        for name in names:
            path = source / name.lstrip("/")
            destination = target / path.name if to.endswith("/") else target
            destination.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, destination, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(path, destination)

    def serve(self, image: bytes) -> None:
        """Run CMD until the health check succeeds, classify the image, and stop the server as `docker stop` does."""
        server = self.run(self.command)
        try:
            for _ in range(60):
                if self.run(self.health, stderr=subprocess.DEVNULL).wait() == 0:
                    break
                time.sleep(1)
            else:
                sys.exit("HEALTHCHECK: failed for a minute.")
            owners = Path(f"/proc/{server.pid}/status").read_text().split("Uid:\t")[1].split()[0]
            with urllib.request.urlopen("http://127.0.0.1:8000/healthz") as answer:
                print(f"server runs as user {owners}; /healthz: {answer.status} {answer.read().decode()}")
            request = urllib.request.Request("http://127.0.0.1:8000/v1/classify?top=1", image, {"Content-Type": "image/jpeg"})
            with urllib.request.urlopen(request) as answer:
                print(f"/v1/classify: {answer.status} {answer.read().decode()}")
        finally:
            server.send_signal(signal.SIGTERM)
        print(f"stopped with exit code {server.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="folder with the files of the image python:3.12-slim")
    parser.add_argument("--model", required=True, help="a .fqvit file, relative to the repository")
    parser.add_argument("--image", required=True, type=Path, help="a JPEG file to classify")
    parser.add_argument("--work", type=Path, default=Path("/tmp/stages"), help="folder of the stages")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    stages = Stages(args.root, args.work, {"MODEL": args.model})
    for word, rest in instructions((REPOSITORY / "Dockerfile").read_text()):
        stages.step(word, rest)
    stages.serve(args.image.read_bytes())


if __name__ == "__main__":
    main()
