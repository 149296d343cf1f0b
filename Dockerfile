# docker build -t tieringd .
# docker run -v /etc/tieringd:/etc/tieringd:ro -v /var/lib/kafka/data:/var/lib/kafka/data:ro -v tieringd:/var/lib/tieringd tieringd
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY tieringd ./tieringd
COPY deploy ./deploy
RUN python -m venv /opt/tieringd && /opt/tieringd/bin/pip install --no-cache-dir .

FROM python:3.12-slim
# The container reads the broker's files as the broker's user. Set another number at run time with --user.
RUN groupadd --gid 1000 tieringd \
    && useradd --uid 1000 --gid 1000 --home-dir /var/lib/tieringd --create-home --shell /usr/sbin/nologin tieringd
COPY --from=build /opt/tieringd /opt/tieringd
COPY config /usr/share/doc/tieringd/config
ENV PATH=/opt/tieringd/bin:$PATH PYTHONUNBUFFERED=1
USER tieringd
VOLUME /var/lib/tieringd
EXPOSE 9640
ENTRYPOINT ["tieringd"]
CMD ["run", "--config", "/etc/tieringd/tieringd.yaml"]
