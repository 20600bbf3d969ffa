# Every verb of the command line. From the locks of what runs and what builds: no tool of development, and no
# pip, is in the image. It writes to /tmp only, so its root may be read-only.
FROM python:3.11-slim-bookworm AS build
WORKDIR /grabstream
# With requirements-archives.lock, the image can also export, read archives, and use S3-compatible stores.
ARG LOCK=requirements-runtime.lock
COPY requirements-build.lock requirements-runtime.lock requirements-archives.lock ./
RUN python -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r requirements-build.lock \
    && python -m venv --without-pip /venv \
    && /build/bin/pip --python /venv/bin/python install --no-cache-dir --require-hashes -r "$LOCK"
COPY pyproject.toml README.md LICENSE ./
COPY grabstream grabstream
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /build/bin/pip --python /venv/bin/python install --no-cache-dir --no-deps /wheels/*.whl

FROM python:3.11-slim-bookworm
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# A number, so that a platform can tell that it is not root (`runAsNonRoot`).
RUN install -d -m 700 -o 1000 -g 1000 /keys /certificates
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["grabstream"]
CMD ["worker"]
