# A server for one model: `docker build --build-arg MODEL=deit_tiny.fqvit -t deit-tiny .`, then `docker run -p 8000:8000 deit-tiny`.
# MODEL is a path inside the build context. See docs/how-to/serve-over-http.md.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
# Versions are not pinned: Debian's stable release determines them, and its archive does not keep old versions.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY native native
COPY src src
RUN python -m venv /app/env && /app/env/bin/pip install --no-cache-dir '.[serve]'

FROM python:${PYTHON}-slim
ARG MODEL
COPY --from=build /app/env /app/env
COPY ${MODEL} /app/models/
RUN useradd --system --no-create-home --uid 10001 fqvit && /app/env/bin/fqvit doctor && ls /app/models/*.fqvit
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s CMD ["/app/env/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz')"]
# The shell expands the name of the model; exec lets the server receive the signals of `docker stop`.
CMD ["/bin/sh", "-c", "exec /app/env/bin/fqvit serve /app/models/*.fqvit --host 0.0.0.0"]
