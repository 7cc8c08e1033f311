# pdproxy with its dependencies, run by an unprivileged user.
#   docker build -t pdproxy .
#   docker run -p 1999:1999 pdproxy --prefillers A:7100-7103 --decoders C:7100-7103

FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE requirements-ci.lock ./
COPY pdproxy pdproxy
# The versions that CI has tested, as wheels; then an environment of those alone.
RUN pip wheel --no-cache-dir --wheel-dir /wheels --constraint requirements-ci.lock . \
 && python -m venv --without-pip /opt/pdproxy \
 && pip --python /opt/pdproxy/bin/python install --no-index --find-links /wheels pdproxy

FROM python:3.13-slim
COPY --from=build /opt/pdproxy /opt/pdproxy
# From outside the container only an address of its own can be reached, so not localhost.
ENV PATH=/opt/pdproxy/bin:$PATH \
    PDPROXY_HOST=0.0.0.0
# A number, so that a cluster that refuses root can see that it is not.
USER 10001:10001
EXPOSE 1999
# Proxies from the environment are not for the way to oneself.
HEALTHCHECK --interval=10s --timeout=4s --start-period=10s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('PDPROXY_PORT', '1999') + '/health', timeout=3)"]
ENTRYPOINT ["pdproxy"]
