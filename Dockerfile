# The daemon:                     docker build --tag tieringd .
# With Spark for the jobs:        docker build --tag tieringd-spark --target spark .
# How to run it beside a broker:  docs/install_container.md, deploy/container/compose.yaml
#
# What is installed is locked with hashes: `make lock` writes deploy/container/*.lock from pyproject.toml.
FROM python:3.12-slim AS wheel
WORKDIR /src
COPY deploy/container/requirements-build.lock ./
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes --requirement requirements-build.lock
COPY pyproject.toml README.md LICENSE ./
COPY tieringd ./tieringd
COPY pyspark_tieringd ./pyspark_tieringd
COPY deploy ./deploy
COPY docs ./docs
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.12-slim AS install
COPY deploy/container/requirements.lock /
RUN python -m venv /opt/tieringd \
    && /opt/tieringd/bin/pip install --no-cache-dir --require-hashes --requirement /requirements.lock
COPY --from=wheel /wheels /wheels
RUN /opt/tieringd/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

FROM python:3.12-slim AS install-spark
COPY deploy/container/requirements-spark.lock /
RUN python -m venv /opt/tieringd \
    && /opt/tieringd/bin/pip install --no-cache-dir --require-hashes --requirement /requirements-spark.lock
COPY --from=wheel /wheels /wheels
RUN /opt/tieringd/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

FROM python:3.12-slim AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tieringd" \
      org.opencontainers.image.description="Tiered storage beside a Kafka-API broker" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="python:3.12-slim"
# The broker's user, who owns the files that pins link to. Set another number at run time with --user.
RUN groupadd --gid 1000 tieringd \
    && useradd --uid 1000 --gid 1000 --home-dir /var/lib/tieringd --create-home --shell /usr/sbin/nologin tieringd
COPY config /usr/share/doc/tieringd/config
COPY docs /usr/share/doc/tieringd
# Only the container's own network reaches the admin page, so it listens on all of its addresses.
ENV PATH=/opt/tieringd/bin:$PATH PYTHONUNBUFFERED=1 TIERINGD_ADMIN_HOST=0.0.0.0 \
    TIERINGD_CONFIG=/etc/tieringd/tieringd.yaml TIERINGD_HEALTH_URL=http://127.0.0.1:9640/healthz
VOLUME /var/lib/tieringd
EXPOSE 9640 9095
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=5 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['TIERINGD_HEALTH_URL'], timeout=8)"]
ENTRYPOINT ["tieringd"]
CMD ["run"]

FROM base AS spark
# Spark runs on Java.
RUN apt-get update && apt-get install --yes --no-install-recommends default-jre-headless \
    && rm -rf /var/lib/apt/lists/*
COPY --from=install-spark /opt/tieringd /opt/tieringd
USER tieringd
# Jobs end by themselves, and serve nothing.
HEALTHCHECK NONE
CMD ["spark", "--help"]

FROM base AS daemon
COPY --from=install /opt/tieringd /opt/tieringd
USER tieringd
