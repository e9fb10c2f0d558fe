"""A stand-in for the Hugging Face Hub: a local HTTP server with small repositories."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A local hub. repositories: {"ORG/NAME": {file name: bytes}}; the revisions are main and v1."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, with_body: bool) -> None:
                hub.requests.append(self.path)
                if self.path.startswith("/api/models/"):
                    return self.answer_about()
                organisation, name, _, revision, file = self.path.lstrip("/").split("/", 4)
                files = hub.repositories.get(f"{organisation}/{name}")
                if files is None:
                    return self.not_found("RepoNotFound")
                if revision not in ("main", "v1", COMMIT):
                    return self.not_found("RevisionNotFound")
                if file not in files:
                    return self.not_found("EntryNotFound")
                body = files[file]
                self.send_response(200)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def answer_about(self) -> None:
                """Answer with the list of files: /api/models/ORG/NAME[/revision/REVISION]."""
                parts = self.path.partition("?")[0].split("/")[3:]
                files = hub.repositories.get("/".join(parts[:2]))
                if files is None:
                    return self.not_found("RepoNotFound")
                if len(parts) > 2 and parts[3] not in ("main", "v1", COMMIT):
                    return self.not_found("RevisionNotFound")
                about = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                body = json.dumps(about).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def not_found(self, code: str) -> None:
                self.send_response(404)
                self.send_header("X-Error-Code", code)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stop serving: connections are then refused."""
        self.server.shutdown()
        self.server.server_close()
