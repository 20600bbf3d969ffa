# A worker, and every other verb of the command line.
FROM python:3.11-slim-bookworm AS build
WORKDIR /grabstream
COPY requirements.lock pyproject.toml README.md LICENSE ./
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
COPY grabstream grabstream
COPY models models
COPY lua lua
COPY streams streams
COPY projections projections
COPY ops ops
COPY gateway gateway
RUN /venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation '.[server]'

FROM python:3.11-slim-bookworm
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH
RUN useradd --create-home grabstream && install -d -m 700 -o grabstream /keys
USER grabstream
WORKDIR /home/grabstream
ENTRYPOINT ["grabstream"]
CMD ["worker"]
